"""`EngineHandle`: starts the engine processes, notices when one ends, stops them in order.

Knows the processes and their addresses, not what is said to them (see `client`). Light: the
processes are started before this one imports the rest of what it needs. Engines on other nodes are
`remote_engines`' business.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from penstock import log
from penstock.config.schema import EngineConfig
from penstock.ipc.address import address, private_folder, remove
from penstock.ipc.process import Child, need_open_files, own_gpus

if TYPE_CHECKING:
    from penstock.frontend.remote_engines import RemoteEngines

ENGINE_MODULE = "penstock.engine_process"
_RESTART_DELAY_S = 1.0
_MAX_RESTARTS = 3  # of a replica, one soon after the other
_SOON_S = 60.0
_log = log.get(__name__)

OnEnd = Callable[[int, str], None]
"""Which engine ended by itself, and how. Called in another thread."""


def how_it_ended(code: int, where: str = "") -> str:
    """As `EngineHandle` is told."""
    how = f"by signal {-code}" if code < 0 else f"with code {code}"
    return f"ended {how}{where}; its log says why"


class EngineProcess(Protocol):
    """A child, or what stands for one on another node."""

    def ask_to_leave(self) -> None: ...

    def kill_unasked(self) -> None: ...

    def stop(self) -> None: ...


class EngineHandle:
    """The addresses exist at once, the processes after `start`.

    Of several engines (replicas) one that ends by itself is started again, at its address, while
    the others go on. One alone is not: whoever supervises the server starts that anew.
    """

    @classmethod
    def of(cls, config: EngineConfig) -> "EngineHandle":
        """With as many engines as the settings want, where they want them."""
        remote = None
        if config.data_parallel_size > 1:
            from penstock.frontend.remote_engines import find_remote_engines

            remote = find_remote_engines(config)
        return cls(config.data_parallel_size, remote)

    def __init__(self, num_engines: int = 1, remote: "RemoteEngines | None" = None) -> None:
        """`remote`: where a launcher has placed all engines but the first."""
        need_open_files()
        self._remote = remote
        self.socket_folder = private_folder()
        self.addresses = [address(self.socket_folder, "engine") for _ in range(num_engines)]
        self._task: dict[str, Any] = {}
        self._num_gpus = 1  # of each engine
        self._processes: dict[int, EngineProcess] = {}
        self._spawned_at = [0.0] * num_engines
        self._num_restarts = [0] * num_engines
        self._ends: deque[tuple[int, str]] = deque(maxlen=num_engines)  # for who watches later
        self._listeners: list[OnEnd] = []
        self._has_failed = False
        self._is_stopping = False
        self._lock = threading.Lock()

    @property
    def restarts(self) -> bool:
        """Whether an engine that has ended comes back."""
        return len(self.addresses) > 1

    def start(self, config: Mapping[str, Any], begun_at: float | None = None) -> None:
        """Spawn them. `begun_at`: when somebody began to wait for them, if not now."""
        assert not self._processes, "an engine handle starts its processes once"
        self._task = {
            "config": dict(config) | ({} if self._remote is None else {"launcher": "local"}),
            "begun_at": time.time() if begun_at is None else begun_at,
        }
        axes = ("tensor", "pipeline", "context")
        self._num_gpus = math.prod(config.get(f"{axis}_parallel_size", 1) for axis in axes)
        for index in range(len(self.addresses)):
            self._spawn(index)
        if self._remote is not None:
            self._remote.open()

    def watch(self, on_end: OnEnd) -> None:
        """Tell of every engine that ends by itself, also of those that have."""
        with self._lock:
            self._listeners.append(on_end)
            ends = list(self._ends)
        for index, message in ends:
            on_end(index, message)

    def kill(self, index: int) -> None:
        """One that hangs; it then ends by itself, as far as anybody is told."""
        self._processes[index].kill_unasked()

    @property
    def is_started(self) -> bool:
        return bool(self._processes)

    @property
    def pid(self) -> int:
        """Of the first, which is a child."""
        first = self._processes[0]
        assert isinstance(first, Child)
        return first.pid

    @property
    def is_alive(self) -> bool:
        """Whether what was started can go on."""
        return self.is_started and not self._has_failed

    def stop(self) -> None:
        """Blocks until the processes are gone; may be called twice."""
        with self._lock:
            self._is_stopping = True
            processes = list(self._processes.values())
        for process in processes:
            process.ask_to_leave()
        for process in processes:
            process.stop()
        if self._remote is not None:
            self._remote.close()
        remove(self.socket_folder)

    def _spawn(self, index: int) -> None:
        with self._lock:
            if self._is_stopping:
                return
            self._spawned_at[index] = time.time()
            task = {
                **self._task,
                "address": self.addresses[index],
                "spawned_at": self._spawned_at[index],
                "replica": index,
            }
            if self._num_restarts[index]:
                task["begun_at"] = self._spawned_at[index]
            self._processes[index] = self._process(index, task)

    def _process(self, index: int, task: dict[str, Any]) -> EngineProcess:
        ended = partial(self._ended, index)
        if self._remote is not None and index > 0:
            return self._remote.start(index, task | {"num_gpus": self._num_gpus}, ended)
        name, env = "engine", {}
        if len(self.addresses) > 1:
            name, env = f"engine {index}", own_gpus(index, self._num_gpus)
        return Child(ENGINE_MODULE, task, name, lambda code: ended(how_it_ended(code)), env=env)

    def _ended(self, index: int, how: str) -> None:
        message = f"the engine process {how}"
        with self._lock:
            lived_s = time.time() - self._spawned_at[index]
            self._num_restarts[index] = 1 if lived_s > _SOON_S else self._num_restarts[index] + 1
            again = self.restarts and self._num_restarts[index] <= _MAX_RESTARTS
            self._has_failed |= not again
            self._ends.append((index, message))
            listeners = list(self._listeners)
        for on_end in listeners:
            on_end(index, message)
        if again:
            _log.warning("engine %d is started again", index)
            timer = threading.Timer(_RESTART_DELAY_S, self._spawn, (index,))
            timer.daemon = True
            timer.start()
