"""`Keeper`: an actor of Ray that holds the place of one rank, and has the rank as its child."""

import queue
from collections.abc import Mapping
from typing import Any

import ray

from penstock.ipc.process import Child


class Keeper:
    """Its child leaves with it: when rank 0 ends Ray ends the actor, or with the node."""

    def __init__(self) -> None:
        self._codes: queue.SimpleQueue[int] = queue.SimpleQueue()

    def place(self) -> tuple[str, list[str]]:
        """Id of the node, and the GPUs that Ray gives to this rank, by their names there."""
        context = ray.get_runtime_context()
        return context.get_node_id(), context.get_accelerator_ids().get("GPU", [])

    def start(self, task: Mapping[str, Any], name: str) -> None:
        self._child = Child("penstock.runtime.launched_worker", task, name, on_exit=self._codes.put)

    def wait(self) -> int:
        """The exit code of the child."""
        return self._codes.get()
