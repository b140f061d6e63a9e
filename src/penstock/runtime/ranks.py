"""`RankGroup`: the further ranks of an engine, as rank 0 sees them: agrees with them, stops them.

Who starts them is another matter: rank 0 itself (`LocalRanks`), a launcher (`LaunchedRanks`), or
Ray (`RayRanks`).
"""

import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from penstock.config.launch import Place
from penstock.config.run import RunConfig
from penstock.errors import BackendError
from penstock.ipc.channel import Peer
from penstock.ipc.meeting import listen
from penstock.ipc.messages import RankCache, RankFailed, RankReady, RankResult
from penstock.runtime.launched_ranks import LaunchedRanks
from penstock.runtime.local_ranks import LocalRanks
from penstock.runtime.ray_ranks import RayRanks
from penstock.runtime.worker import WorkerTask
from penstock.types.cache_spec import CacheSize
from penstock.types.step import StepResult

_NEWS_S = 2.0


class Launch(Protocol):
    @property
    def host(self) -> str: ...  # of rank 0, to listen at; nothing means all addresses

    @property
    def address(self) -> str: ...  # of rank 0, as the others reach it

    @property
    def own_gpu(self) -> int | None: ...  # of rank 0, where another than the first is its own

    @property
    def peers(self) -> Sequence[Peer]: ...  # in the order of ranks, from 1

    def start(self, tasks: Sequence[WorkerTask]) -> None: ...

    def receive(self) -> Any: ...

    def stop(self) -> None: ...


class RankGroup:
    """`place`: of rank 0, where a launcher has started the others. `on_death`: called in a thread
    with what has happened, when a rank ends unasked; it does not return."""

    def __init__(
        self,
        config: RunConfig,
        model_kwargs: dict[str, Any] | None,
        revision: str | None,
        socket_folder: str,
        log_level: str | None,
        place: Place | None,
        by_ray: bool,
        secret: bytes,
        interface: str | None,
        on_death: Callable[[str], None],
    ) -> None:
        self._on_death = on_death
        self._has_died = threading.Event()
        self._num_sampling = sum(map(config.mesh.is_sampling_rank, range(1, config.mesh.size)))
        self._results: dict[int, dict[int, StepResult]] = {}  # by step and rank, until asked for
        self._launch: Launch
        if by_ray:
            self._launch = RayRanks(config, interface, log_level, self._report)
        elif place is None:
            self._launch = LocalRanks(socket_folder, self._report)
        else:
            self._launch = LaunchedRanks(place, secret, interface, self._report)
        self.listener: socket.socket = listen(self._launch.host, 0)
        self.meeting_point = f"{self._launch.address}:{self.listener.getsockname()[1]}"
        self._launch.start(
            [
                WorkerTask(
                    rank=rank,
                    config=config,
                    model_kwargs=model_kwargs,
                    revision=revision,
                    meeting_point=self.meeting_point,
                    log_level=log_level,
                )
                for rank in range(1, config.mesh.size)
            ]
        )
        self.peers = self._launch.peers
        self.own_gpu = self._launch.own_gpu

    def _report(self, what: str) -> None:
        # Gone in the middle of collectives: rank 0 may hang in one.
        self._has_died.set()
        self._on_death(f"{what}; the engine cannot go on")

    def wait_for_news(self) -> None:
        """After a failure that the death of a rank may explain: let that be said instead."""
        if self.peers and self._has_died.wait(_NEWS_S):
            threading.Event().wait()  # the process ends

    def agree(self, cache: CacheSize) -> tuple[CacheSize, list[int]]:
        """The cache that every rank can hold, and the bytes of weights each holds."""
        weights = [0] * len(self.peers)
        for _ in self.peers:
            match self._launch.receive():
                case RankReady(rank=rank, cache=theirs, weight_bytes=weight_bytes):
                    cache = cache.within(theirs)
                    weights[rank - 1] = weight_bytes
                case RankFailed(rank=rank, message=message):
                    raise BackendError(f"rank {rank}: {message}")
        for peer in self.peers:
            peer.send(RankCache(cache=cache))
        return cache, weights

    def results(self, step_id: int) -> list[StepResult]:
        """What every further rank that samples found, in their order; waits for them."""
        while len(self._results.setdefault(step_id, {})) < self._num_sampling:
            match self._launch.receive():
                case RankResult(rank=rank, result=result):
                    self._results.setdefault(result.step_id, {})[rank] = result
                case RankFailed(rank=rank, message=message):
                    raise BackendError(f"rank {rank}: {message}")
        found = self._results.pop(step_id)
        return [found[rank] for rank in sorted(found)]

    def stop(self) -> None:
        self._launch.stop()
