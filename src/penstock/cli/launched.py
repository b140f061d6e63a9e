"""What a process does that a launcher has started beside rank 0, once rank 0 has told it."""

import importlib

from penstock import log
from penstock.config.launch import Place
from penstock.ipc.meeting import join
from penstock.ipc.messages import EngineTask


def run_launched(
    place: Place, secret: bytes, interface: str | None, log_level: str | None, is_rank: bool
) -> int:
    """The exit code. `is_rank`: most likely it is a rank, and torch is imported before it joins."""
    log.setup(f"rank {place.rank}", log_level)
    if is_rank:
        importlib.import_module("penstock.runtime.launched_worker")
    link, told = join(place, secret, interface)
    if isinstance(told, EngineTask):
        from penstock.frontend.replica_keeper import keep_engine

        log.setup(f"replica {place.rank}", log_level)
        return keep_engine(link, told, place)
    from penstock.runtime.launched_worker import run_rank

    return run_rank(link, told, place, interface)
