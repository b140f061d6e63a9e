"""`RankGroup`: the further ranks of an engine: starts them, agrees with them, stops them."""

import os
import socket
from functools import partial
from typing import Any

import msgspec

from penstock import log
from penstock.config.run import RunConfig
from penstock.errors import BackendError
from penstock.ipc import channel
from penstock.ipc.address import address
from penstock.ipc.messages import FromRank, RankCache, RankFailed, RankReady, RankResult, Stop
from penstock.ipc.process import Child
from penstock.runtime.worker import WorkerTask
from penstock.types.cache_spec import CacheSize
from penstock.types.step import StepResult

_log = log.get(__name__)


class RankGroup:
    """The further ranks of this engine, as rank 0 sees them."""

    def __init__(
        self,
        config: RunConfig,
        model_kwargs: dict[str, Any] | None,
        socket_folder: str,
        log_level: str | None,
    ) -> None:
        self._inbox = channel.Receiver(address(socket_folder, "rank0"), FromRank)
        self.meeting_point = f"127.0.0.1:{_free_port()}"
        self.senders: list[channel.Sender] = []
        self._is_stopping = False
        self._num_sampling = sum(map(config.mesh.is_sampling_rank, range(1, config.mesh.size)))
        self._children: list[Child] = []
        self._results: dict[int, dict[int, StepResult]] = {}  # by step and rank, until asked for
        for rank in range(1, config.mesh.size):
            own = address(socket_folder, f"rank{rank}")
            task = WorkerTask(
                rank=rank,
                config=config,
                model_kwargs=model_kwargs,
                meeting_point=self.meeting_point,
                address=own,
                rank0_address=self._inbox.address,
                log_level=log_level,
            )
            self._children.append(
                Child(
                    "penstock.runtime.worker",
                    msgspec.to_builtins(task),
                    f"rank {rank}",
                    on_exit=partial(self._on_exit, rank),
                )
            )
            self.senders.append(channel.Sender(own))

    def _on_exit(self, rank: int, code: int) -> None:
        if self._is_stopping:
            return
        # Gone in the middle of collectives: rank 0 may hang in one and cannot say goodbye.
        _log.critical("rank %d ended with code %d; the engine cannot go on", rank, code)
        os._exit(1)

    def agree(self, cache: CacheSize) -> tuple[CacheSize, list[int]]:
        """The cache that every rank can hold, and the bytes of weights each holds."""
        weights = [0] * len(self._children)
        for _ in self._children:
            match self._inbox.receive(timeout_ms=-1):
                case RankReady(rank=rank, cache=theirs, weight_bytes=weight_bytes):
                    cache = cache.within(theirs)
                    weights[rank - 1] = weight_bytes
                case RankFailed(rank=rank, message=message):
                    raise BackendError(f"rank {rank}: {message}")
        for sender in self.senders:
            sender.send(RankCache(cache=cache))
        return cache, weights

    def results(self, step_id: int) -> list[StepResult]:
        """What every further rank that samples found, in their order; waits for them."""
        while len(self._results.setdefault(step_id, {})) < self._num_sampling:
            match self._inbox.receive(timeout_ms=-1):
                case RankResult(rank=rank, result=result):
                    self._results.setdefault(result.step_id, {})[rank] = result
                case RankFailed(rank=rank, message=message):
                    raise BackendError(f"rank {rank}: {message}")
        found = self._results.pop(step_id)
        return [found[rank] for rank in sorted(found)]

    def stop(self) -> None:
        self._is_stopping = True
        for sender in self.senders:
            sender.send(Stop())
        for child in self._children:
            child.stop()


def _free_port() -> int:
    with socket.socket() as probe_socket:
        probe_socket.bind(("127.0.0.1", 0))
        return int(probe_socket.getsockname()[1])
