"""`trtllm-llmapi-launch COMMAND ...`, which srun, mpirun or torchrun start once for each rank.

Rank 0 becomes the command. The others serve as ranks of the engine that it starts, or keep engines
of its replicas, whatever the command is: `trtllm-serve`, `trtllm-bench`, or a program with `LLM`.
"""

import os
import sys
from typing import NoReturn

from penstock.config.launch import find_place, rank_secret
from penstock.errors import ConfigError, PenstockError

_USAGE = "usage: srun -N 2 --ntasks-per-node=8 trtllm-llmapi-launch COMMAND [flags of COMMAND]"


def main() -> NoReturn:
    try:
        status = _run(sys.argv[1:])
    except PenstockError as error:
        print(f"error: {error}", file=sys.stderr)
        status = 2 if isinstance(error, ConfigError) else 1
    raise SystemExit(status)


def _run(command: list[str]) -> int:
    if not command or command[0].startswith("-"):
        print(_USAGE, file=sys.stdout if "--help" in command else sys.stderr)
        return 0 if "--help" in command else 2
    place = find_place("auto")
    secret = b"" if place is None else rank_secret()
    if place is not None and place.rank:
        from penstock.cli.launched import run_launched

        return run_launched(place, secret, interface=None, log_level=None, is_rank=True)
    try:
        os.execvp(command[0], list(command))
    except OSError as error:
        raise ConfigError(f"cannot run {command[0]}: {error.strerror}") from None


if __name__ == "__main__":
    main()
