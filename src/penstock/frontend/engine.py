"""`EngineHandle`: starts the engine process, notices its end, stops it in order.

Knows the process and its address, not what is said to it (see `client`).
"""

import shutil
import time
from collections.abc import Callable, Mapping
from typing import Any

from penstock.ipc.channel import address, private_folder
from penstock.ipc.process import Child

ENGINE_MODULE = "penstock.engine_process"


class EngineHandle:
    """The address exists at once, the process after `start`."""

    def __init__(self) -> None:
        self.socket_folder = private_folder()
        self.address = address(self.socket_folder, "engine")
        self._child: Child | None = None

    def start(self, config: Mapping[str, Any], on_exit: Callable[[str], None]) -> None:
        """Spawn it. `on_exit(what happened)` runs in another thread if it ends by itself."""
        assert self._child is None, "an engine handle starts one process"

        def report(code: int) -> None:
            how = f"by signal {-code}" if code < 0 else f"with code {code}"
            on_exit(f"the engine process ended {how}; its log says why")

        task = {"config": dict(config), "address": self.address, "spawned_at": time.time()}
        self._child = Child(ENGINE_MODULE, task, "engine", report)

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
        shutil.rmtree(self.socket_folder, ignore_errors=True)
