"""`python -m penstock.ipc.child FD MODULE`: as `python -m MODULE`, without a search for garbage
while it is imported. Python would look again and again at all that is there already, which is a
third of the time that importing torch takes. `read_task` ends it.

And without the signals that end a server: Slurm, systemd and others send them to every process of
a service, and a child must stay for the requests that run. It leaves when its parent closes stdin.

FD takes the reason for which it ends by itself: an exception, or the text given to `sys.exit`.
"""

import gc
import os
import runpy
import signal
import sys

_MAX_REASON_CHARS = 1000


def _tell(fd: int, reason: str) -> None:
    os.write(fd, reason[:_MAX_REASON_CHARS].encode())


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    gc.disable()
    reason_fd, module = int(sys.argv.pop(1)), sys.argv.pop(1)
    os.set_inheritable(reason_fd, False)
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as error:
        if isinstance(error.code, str):
            _tell(reason_fd, error.code)
            sys.exit(1)
        raise
    except BaseException as error:
        _tell(reason_fd, f"{type(error).__name__}: {error}")
        raise
