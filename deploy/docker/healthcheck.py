#!/usr/bin/python3 -ISB
"""Asks /health of the server that this container runs, on the port of its command line.

Exit code 0 if it is well, or if the container runs something else, such as a shell.
"""

import http.client
import re
import sys
from pathlib import Path

TIMEOUT_S = 4
_LOCAL = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def flag(command: str, name: str, default: str) -> str:
    """The last one counts, as for the server."""
    found = re.findall(rf"\0--{name}[=\0]([^\0]+)", command)
    return found[-1] if found else default


def is_well(command: str) -> bool:
    if not re.search(r"trtllm-serve|penstock\0serve", command):
        return True
    host, port = flag(command, "host", "localhost"), int(flag(command, "port", "8000"))
    connection = http.client.HTTPConnection(_LOCAL.get(host, host), port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(0 if is_well(Path("/proc/1/cmdline").read_text()) else 1)
