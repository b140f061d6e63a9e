"""A rank other than 0 that a launcher has started: does what rank 0 says, once it has found it.

It stays until rank 0 lets it go or has left, whatever signal comes: Slurm and torchrun send theirs
to all ranks, and requests may finish.
"""

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import msgspec

from penstock import log
from penstock.config.launch import Place
from penstock.config.run import RunConfig
from penstock.errors import PenstockError
from penstock.hub.folder import local_folder
from penstock.ipc.interfaces import interface_of
from penstock.ipc.link import Link
from penstock.ipc.meeting import join
from penstock.ipc.messages import RankTask
from penstock.ipc.process import on_parent_exit, read_task
from penstock.parallel.mesh import use_interface
from penstock.runtime.worker import WorkerTask, run

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_log = log.get(__name__)


class LaunchedTask(msgspec.Struct, frozen=True, kw_only=True):
    """Of a rank whose place is told it by the process that has started it."""

    place: Place
    secret: str
    log_level: str | None


def run_rank(link: Link, told: RankTask, place: Place, interface: str | None) -> int:
    """The exit code of this process: 0 when rank 0 has said that it is over."""
    task = msgspec.json.decode(told.task, type=WorkerTask)
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)

    def on_end(reason: str) -> None:
        _log.error("rank 0 at %s has left%s", place.host, reason and f": {reason}")
        os._exit(1)

    link.listen(on_end)
    own = interface or task.interface or interface_of(link.local_address)
    use_interface(own, is_asked=interface is not None or task.is_interface_asked)
    task = msgspec.structs.replace(task, config=_with_own_files(task.config, task.revision))
    try:
        run(task, link.receive, lambda: link)
    except Exception:
        return 1  # it is in the log
    os._exit(0)  # before rank 0 leaves, too


def _with_own_files(config: RunConfig, revision: str | None) -> RunConfig:
    """The model as this node has it, or can fetch it, where rank 0's folder is not here."""
    if Path(config.model_path).exists():
        return config
    folder = local_folder(config.model, revision, weights=config.load_format != "dummy")
    return replace(config, model_path=str(folder))


def main() -> None:
    task = msgspec.convert(read_task(), LaunchedTask)
    on_parent_exit(lambda: os._exit(0))
    try:
        log.setup(f"rank {task.place.rank}", task.log_level)
        link, told = join(task.place, task.secret.encode(), None)
        sys.exit(run_rank(link, told, task.place, None))
    except PenstockError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
