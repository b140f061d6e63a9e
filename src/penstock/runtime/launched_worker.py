"""A rank other than 0 that a launcher has started: finds rank 0, and does what it says.

It stays until rank 0 lets it go or has left, whatever signal comes: Slurm and torchrun send theirs
to all ranks, and requests may finish.
"""

import os
import signal
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path

import msgspec

from penstock import log
from penstock.config.launch import Place
from penstock.config.run import RunConfig
from penstock.errors import BackendError, ConfigError, PenstockError
from penstock.hub.folder import local_folder
from penstock.ipc.interfaces import address_of, interface_of
from penstock.ipc.link import HANDSHAKE_S, Link, LinkRefused
from penstock.ipc.messages import PROTOCOL_VERSION, RankJoined, RankRefused, RankTask, ToRank
from penstock.ipc.process import on_parent_exit, read_task
from penstock.parallel.mesh import use_interface
from penstock.runtime.worker import WorkerTask, run

_RETRY_S = 0.5
_MEET_S = 7200.0  # rank 0 may fetch a model first
_MAX_REFUSALS = 5
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_log = log.get(__name__)


class LaunchedTask(msgspec.Struct, frozen=True, kw_only=True):
    """Of a rank whose place is told it by the process that has started it."""

    place: Place
    secret: str
    log_level: str | None


def run_launched(place: Place, secret: bytes, interface: str | None, log_level: str | None) -> int:
    """The exit code of this process: 0 when rank 0 has said that it is over."""
    log.setup(f"rank {place.rank}", log_level)
    link = _connect(place, secret, interface)
    link.send(
        RankJoined(version=PROTOCOL_VERSION, rank=place.rank, size=place.size, node=place.node)
    )
    try:
        told = link.receive_first(None)
    except (OSError, EOFError):
        raise BackendError(f"rank 0 at {place.host} has left") from None
    if isinstance(told, RankRefused):
        raise ConfigError(f"rank 0 at {place.host} refuses this rank: {told.message}")
    assert isinstance(told, RankTask), told
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


def _connect(place: Place, secret: bytes, interface: str | None) -> Link:
    deadline, num_refusals, is_told = time.monotonic() + _MEET_S, 0, False
    source = None if interface is None else (address_of(interface), 0)
    while True:
        try:
            connection = socket.create_connection(
                (place.host, place.port), timeout=HANDSHAKE_S, source_address=source
            )
            return Link(connection, secret, "worker", ToRank)
        except LinkRefused as error:
            num_refusals += 1
            if num_refusals == _MAX_REFUSALS:
                raise ConfigError(
                    f"what listens at {place.host} port {place.port} does not take this rank: "
                    f"{error}; is PENSTOCK_RANK_SECRET the same on all nodes?"
                ) from None
        except OSError as error:
            if time.monotonic() > deadline:
                raise BackendError(
                    f"no rank 0 at {place.host} port {place.port} within {_MEET_S:.0f} s: {error}"
                ) from None
        if not is_told:
            _log.info("waiting for rank 0 at %s port %d", place.host, place.port)
            is_told = True
        time.sleep(_RETRY_S)


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
        sys.exit(run_launched(task.place, task.secret.encode(), None, task.log_level))
    except PenstockError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
