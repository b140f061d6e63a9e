"""`LaunchedRanks`: the further ranks where a launcher has started them, with messages over TCP.

Rank 0 waits until all have come (`ipc.meeting`). A link that ends is a rank that has died, wherever
it was.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from penstock import log
from penstock.config.launch import Place
from penstock.errors import BackendError
from penstock.ipc.interfaces import interface_of
from penstock.ipc.link import Link
from penstock.ipc.meeting import MEET_S, Meeting
from penstock.ipc.messages import RankFailed, RankJoined, RankTask, Stop
from penstock.parallel.mesh import use_interface
from penstock.runtime.worker import WorkerTask

_STOP_S = 10.0
_MAX_WAITING = 10_000  # messages
_log = log.get(__name__)


class LaunchedRanks:
    """`on_death`: called in a thread with what has happened to a rank that ends unasked."""

    own_gpu = None

    def __init__(
        self,
        place: Place,
        secret: bytes,
        interface: str | None,
        on_death: Callable[[str], None],
    ) -> None:
        assert place.rank == 0, place
        self._place, self._interface = place, interface
        self._on_death = on_death
        self._inbox: queue.Queue[Any] = queue.Queue(_MAX_WAITING)
        self._joined: dict[int, tuple[Link, str]] = {}  # by rank, with the name of its node
        self._reasons: dict[int, str] = {}  # why a rank says that it fails
        self._ended = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._is_stopping = False
        self._meeting = Meeting(place, secret, interface, self._take)
        self.host, self.port = self._meeting.host, self._meeting.port
        self.address = place.host

    @property
    def peers(self) -> list[Link]:
        return [self._joined[rank][0] for rank in sorted(self._joined)]

    def start(self, tasks: Sequence[WorkerTask]) -> None:
        """Wait until every rank has come, and tell each what to do."""
        _log.info(
            "waiting at %s port %d for %d ranks that %s starts",
            *(self._place.host, self.port, len(tasks), self._place.launcher),
        )
        self._meet(len(tasks))
        self._meeting.close()
        own = self._interface or self._interface_to_others()
        is_asked = self._interface is not None
        use_interface(own, is_asked)
        for task in tasks:
            link, _ = self._joined[task.rank]
            is_here = link.peer_address == link.local_address
            told = msgspec.structs.replace(
                task,
                interface=own if is_here or is_asked else None,
                is_interface_asked=is_asked,
            )
            link.send(RankTask(task=msgspec.json.encode(told)))

    def receive(self) -> Any:
        return self._inbox.get()

    def stop(self) -> None:
        self._is_stopping = True
        for peer in self.peers:
            peer.send(Stop())
        deadline = time.monotonic() + _STOP_S
        for _ in self._joined:
            self._ended.acquire(timeout=max(0.0, deadline - time.monotonic()))

    def _meet(self, num: int) -> None:
        deadline = time.monotonic() + MEET_S
        while len(self._joined) < num:
            if time.monotonic() > deadline:
                missing = [str(rank) for rank in range(1, num + 1) if rank not in self._joined]
                raise BackendError(
                    f"of {num + 1} ranks that {self._place.launcher} starts, {', '.join(missing)} "
                    f"did not come to {self._place.host} port {self.port} within "
                    f"{MEET_S:.0f} s; their logs say why"
                )
            self._meeting.accept()

    def _take(self, link: Link, joined: RankJoined) -> str | None:
        rank = joined.rank
        with self._lock:
            if rank in self._joined:
                return f"rank {rank} is here already, on node {self._joined[rank][1]}"
            self._joined[rank] = link, joined.node
        link.listen(on_end=partial(self._on_end, rank), on_message=partial(self._on_message, rank))
        return None

    def _on_message(self, rank: int, message: Any) -> None:
        if isinstance(message, RankFailed):
            self._reasons[rank] = message.message
        self._inbox.put(message)

    def _on_end(self, rank: int, reason: str) -> None:
        self._ended.release()
        if self._is_stopping:
            return
        link, node = self._joined[rank]
        why = self._reasons.get(rank) or reason
        said = f": {why}" if why else ""
        self._on_death(f"rank {rank} on node {node} ({link.peer_address}) ended{said}")

    def _interface_to_others(self) -> str | None:
        """That of a rank on another node, if there is one."""
        links = sorted(self.peers, key=lambda link: link.peer_address == link.local_address)
        return interface_of(links[0].local_address)
