"""`LocalRanks`: the further ranks as child processes of rank 0, with messages over Unix sockets."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from penstock.ipc import channel
from penstock.ipc.address import address
from penstock.ipc.messages import FromRank, Stop
from penstock.ipc.process import Child
from penstock.runtime.worker import LocalTask, WorkerTask


class LocalRanks:
    """`on_death`: called in a thread with what has happened to a rank that ends unasked."""

    host = address = "127.0.0.1"
    own_gpu = None

    def __init__(self, socket_folder: str, on_death: Callable[[str], None]) -> None:
        self._inbox = channel.Receiver(address(socket_folder, "rank0"), FromRank)
        self._folder, self._on_death = socket_folder, on_death
        self._children: list[Child] = []
        self._is_stopping = False
        self.peers: list[channel.Sender] = []

    def start(self, tasks: Sequence[WorkerTask]) -> None:
        for task in tasks:
            own = address(self._folder, f"rank{task.rank}")
            local = LocalTask(task=task, address=own, rank0_address=self._inbox.address)
            child = Child(
                "penstock.runtime.worker",
                msgspec.to_builtins(local),
                f"rank {task.rank}",
                on_exit=partial(self._on_exit, task.rank),
            )
            self._children.append(child)
            self.peers.append(channel.Sender(own))

    def receive(self) -> Any:
        return self._inbox.receive(timeout_ms=-1)

    def stop(self) -> None:
        self._is_stopping = True
        for peer in self.peers:
            peer.send(Stop())
        for child in self._children:
            child.stop()

    def _on_exit(self, rank: int, code: int) -> None:
        if not self._is_stopping:
            self._on_death(f"rank {rank} ended with code {code}")
