"""`EngineHandle`: starts the engine process, notices its end, stops it in order.

Knows the process and its address, not what is said to it (see `client`). Light: the process is
started before this one imports the rest of what it needs.
"""

import time
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from penstock.ipc.address import address, private_folder, remove
from penstock.ipc.process import Child, need_open_files

ENGINE_MODULE = "penstock.engine_process"


class EngineHandle:
    """The address exists at once, the process after `start`.

    `ended`: what happened, if it ends by itself; its callbacks then run in another thread.
    """

    def __init__(self) -> None:
        need_open_files()
        self.socket_folder = private_folder()
        self.address = address(self.socket_folder, "engine")
        self.ended: Future[str] = Future()
        self._child: Child | None = None

    def start(self, config: Mapping[str, Any], begun_at: float | None = None) -> None:
        """Spawn it. `begun_at`: when somebody began to wait for it, if not now."""
        assert self._child is None, "an engine handle starts one process"

        def report(code: int) -> None:
            how = f"by signal {-code}" if code < 0 else f"with code {code}"
            self.ended.set_result(f"the engine process ended {how}; its log says why")

        spawned_at = time.time()
        task = {
            "config": dict(config),
            "address": self.address,
            "begun_at": spawned_at if begun_at is None else begun_at,
            "spawned_at": spawned_at,
        }
        self._child = Child(ENGINE_MODULE, task, "engine", report)

    @property
    def is_started(self) -> bool:
        return self._child is not None

    @property
    def pid(self) -> int:
        assert self._child is not None
        return self._child.pid

    @property
    def is_alive(self) -> bool:
        return self._child is not None and self._child.alive

    def stop(self) -> None:
        """Blocks until the process is gone; may be called twice."""
        if self._child is not None:
            self._child.stop()
        remove(self.socket_folder)
