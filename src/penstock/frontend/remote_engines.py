"""Engines of replicas that a launcher has placed: `RemoteEngine` is to `EngineHandle` what a child
process is, by a process that keeps the engine there (`replica_keeper`)."""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from penstock import log
from penstock.config.launch import Place, find_place, rank_secret
from penstock.config.schema import EngineConfig
from penstock.errors import BackendError, ConfigError
from penstock.ipc.link import Link
from penstock.ipc.meeting import MEET_S, Meeting
from penstock.ipc.messages import (
    EngineEnded,
    EngineTask,
    ForClient,
    KillEngine,
    Message,
    RankJoined,
    Stop,
)
from penstock.ipc.relay import EngineRelay

_log = log.get(__name__)


class RemoteEngine:
    """The engine of replica `rank`. `on_exit`: told in a thread how it ended by itself."""

    def __init__(self, rank: int, address: str, on_exit: Callable[[str], None]) -> None:
        self._rank, self._on_exit = rank, on_exit
        self._relay = EngineRelay(address)
        self._task: EngineTask | None = None
        self._link: Link | None = None
        self._node = ""
        self._has_joined = self._is_stopping = False
        self._has_left = threading.Event()
        self._lock = threading.Lock()

    def start(self, task: Mapping[str, Any]) -> None:
        """Now, or when its keeper comes."""
        self._task = EngineTask(task=msgspec.json.encode(task))
        self._tell(self._task)

    def join(self, link: Link, joined: RankJoined) -> str | None:
        """Its keeper has come, perhaps after another one has left. Why it is refused, if it is."""
        with self._lock:
            if self._link is not None:
                return f"replica {self._rank} is here already, on node {self._node}"
            self._link, self._node, self._has_joined = link, joined.node, True
            self._has_left.clear()
            assert self._task is not None
            link.send(self._task)
        _log.info("replica %d starts on node %s (%s)", self._rank, self._node, link.peer_address)
        self._relay.connect(link)
        link.listen(on_end=self._left, on_message=self._handle)
        return None

    def give_up(self, launcher: str) -> None:
        """Unless it has come in time; its clients are told."""
        if not self._has_joined:
            self._relay.fail(
                f"replica {self._rank}, which {launcher} starts, did not come within "
                f"{MEET_S:.0f} s; its log says why"
            )

    def kill_unasked(self) -> None:
        self._tell(KillEngine())

    def ask_to_leave(self) -> None:
        self._is_stopping = True
        self._tell(Stop())

    def stop(self, grace_s: float = 12.0) -> None:
        self.ask_to_leave()
        if self._link is not None and not self._has_left.wait(grace_s):
            _log.warning("replica %d on node %s does not stop", self._rank, self._node)

    def _tell(self, message: Message) -> None:
        link = self._link
        try:
            if link is not None:
                link.send(message)
        except BackendError as error:  # the end of the link is noticed, too
            _log.warning("%s", error)

    def _handle(self, message: Any) -> None:
        match message:
            case ForClient():
                self._relay.hand_back(message)
            case EngineEnded(how=how):
                self._on_exit(how)

    def _left(self, reason: str) -> None:
        assert self._link is not None
        who = f"node {self._node} ({self._link.peer_address})"
        self._relay.connect(None)
        with self._lock:
            self._link = None
        self._has_left.set()
        if not self._is_stopping:
            said = f": {reason}" if reason else ""
            _log.error("replica %d: %s has left%s", self._rank, who, said)
            self._on_exit(f"is out of reach: {who} has left{said}")


def find_remote_engines(config: EngineConfig) -> "RemoteEngines | None":
    """None: replicas are started from here, if there are several."""
    num_engines = config.data_parallel_size
    place = find_place(config.launcher) if num_engines > 1 else None
    if place is None:
        return None
    if place.size != num_engines:
        raise ConfigError(
            f"data_parallel_size is {num_engines}, and {place.launcher} has started {place.size} "
            f"processes: each of them starts the {config.num_ranks} ranks of one replica itself; "
            f"have {num_engines} started (srun --ntasks {num_engines}, torchrun --nproc_per_node "
            "1), or set launcher to local to start all replicas from here"
        )
    return RemoteEngines(place, rank_secret(), config.rank_interface)


class RemoteEngines:
    """Of all replicas but the first, which runs beside the API servers."""

    def __init__(self, place: Place, secret: bytes, interface: str | None) -> None:
        self.num_engines = place.size
        self._launcher = place.launcher
        self._engines: dict[int, RemoteEngine] = {}
        self._meeting = Meeting(place, secret, interface, self._take)
        self._is_stopping = threading.Event()

    def start(
        self, rank: int, task: Mapping[str, Any], on_exit: Callable[[str], None]
    ) -> RemoteEngine:
        """The first time, or again."""
        if rank not in self._engines:
            self._engines[rank] = RemoteEngine(rank, task["address"], on_exit)
        self._engines[rank].start(task)
        return self._engines[rank]

    def open(self) -> None:
        """Take their keepers, as long as this process lives."""
        count = self.num_engines - 1
        _log.info(
            "waiting at port %d for %d more replicas, which %s starts",
            *(self._meeting.port, count, self._launcher),
        )
        threading.Thread(target=self._meet, name="replicas", daemon=True).start()

    def close(self) -> None:
        self._is_stopping.set()

    def _meet(self) -> None:
        deadline, waits = time.monotonic() + MEET_S, True
        while not self._is_stopping.is_set():
            self._meeting.accept()
            if waits and time.monotonic() > deadline:
                waits = False
                for engine in self._engines.values():
                    engine.give_up(self._launcher)
        self._meeting.close()

    def _take(self, link: Link, joined: RankJoined) -> str | None:
        return self._engines[joined.rank].join(link, joined)
