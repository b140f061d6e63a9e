"""`RayRanks`: the further ranks on the nodes of a Ray cluster, a bundle of a placement group each.

Ray chooses the places and starts an actor in each (`ipc.ray_keeper`), whose child process is the
rank. That comes over TCP, as those do that a launcher has started (`LaunchedRanks`), with a secret
that it got through Ray. What Ray itself sends is pickled, and as safe as its cluster is.
"""

import secrets
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from penstock.config.launch import Place
from penstock.config.run import RunConfig
from penstock.errors import BackendError, ConfigError
from penstock.ipc.interfaces import address_of
from penstock.ipc.link import Link
from penstock.ipc.process import own_gpu_index
from penstock.runtime.launched_ranks import LaunchedRanks
from penstock.runtime.launched_worker import LaunchedTask
from penstock.runtime.worker import WorkerTask

_PLACE_S = 300  # for resources that others hold, or for an autoscaler's nodes
_START_S = 120


class RayRanks:
    """`on_death`: called in a thread with what has happened to a rank that ends unasked."""

    def __init__(
        self,
        config: RunConfig,
        interface: str | None,
        log_level: str | None,
        on_death: Callable[[str], None],
    ) -> None:
        import ray

        self._ray, self._on_death = ray, on_death
        self._join_cluster()
        self._num_ranks, self._log_level = config.mesh.size, log_level
        self._bundle = {"CPU": 1.0} | ({"GPU": 1.0} if config.device == "cuda" else {})
        self._secret = secrets.token_hex(32)
        self.address = address_of(interface) if interface else ray.util.get_node_ip_address()
        place = Place(
            launcher="ray",
            rank=0,
            size=self._num_ranks,
            local_rank=0,
            local_size=1,
            host=self.address,
            port=0,
            node=socket.gethostname(),
        )
        self._links = LaunchedRanks(place, self._secret.encode(), interface, on_death)
        self.host = self._links.host
        self._place = replace(place, port=self._links.port)
        self._group: Any = None
        self._keepers: list[Any] = []
        self._is_stopping = False
        self.own_gpu: int | None = None

    @property
    def peers(self) -> list[Link]:
        return self._links.peers

    def start(self, tasks: Sequence[WorkerTask]) -> None:
        self._group = self._placement_group()
        self._keepers = self._placed()
        started = []
        for rank, keeper in enumerate(self._keepers[1:], 1):
            task = LaunchedTask(
                place=replace(self._place, rank=rank),
                secret=self._secret,
                log_level=self._log_level,
            )
            started.append(keeper.start.remote(msgspec.to_builtins(task), f"rank {rank}"))
            self._watch(rank, keeper)
        try:
            self._ray.get(started, timeout=_START_S)
        except self._ray.exceptions.RayError as error:
            raise BackendError(f"Ray did not start the ranks: {error}") from None
        self._links.start(tasks)

    def receive(self) -> Any:
        return self._links.receive()

    def stop(self) -> None:
        self._is_stopping = True
        self._links.stop()
        self._ray.util.remove_placement_group(self._group)
        self._ray.shutdown()

    def _join_cluster(self) -> None:
        handler = signal.getsignal(signal.SIGTERM)  # Ray puts its own there
        try:
            self._ray.init(address="auto", configure_logging=False)
        except ConnectionError as error:
            raise ConfigError(
                f"no Ray cluster is found from here: {error}; start it with 'ray start --head' on "
                "this node and 'ray start --address=HOST:6379' on the others, or set RAY_ADDRESS"
            ) from None
        signal.signal(signal.SIGTERM, handler)

    def _placement_group(self) -> Any:
        """A bundle for each rank, on few nodes; the first is on this one, for rank 0."""
        there = self._ray.cluster_resources()
        for name, each in self._bundle.items():
            if there.get(name, 0) < each * self._num_ranks:
                raise ConfigError(
                    f"{self._num_ranks} ranks want {each:.0f} {name} each, and the Ray cluster has "
                    f"{there.get(name, 0):.0f} {name} in all; lower tensor_parallel_size or "
                    "pipeline_parallel_size, or add nodes"
                )
        here = self._ray.get_runtime_context().get_node_id()
        group = self._ray.util.placement_group(
            [self._bundle] * self._num_ranks,
            strategy="PACK",
            bundle_label_selector=[{"ray.io/node-id": here}] + [{}] * (self._num_ranks - 1),
        )
        if not group.wait(_PLACE_S):
            self._ray.util.remove_placement_group(group)
            raise BackendError(
                f"Ray had no place for {self._num_ranks} ranks of {self._bundle} within "
                f"{_PLACE_S} s; free are {self._ray.available_resources()}"
            )
        return group

    def _placed(self) -> list[Any]:
        """An actor for each rank, in their order: node after node, this one first."""
        from penstock.ipc.ray_keeper import Keeper

        actor: Any = self._ray.remote(Keeper)
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        keepers = [
            actor.options(
                num_cpus=self._bundle["CPU"],
                num_gpus=self._bundle.get("GPU", 0),
                scheduling_strategy=strategy(self._group, placement_group_bundle_index=index),
            ).remote()
            for index in range(self._num_ranks)
        ]
        try:
            places = self._ray.get([one.place.remote() for one in keepers], timeout=_START_S)
        except self._ray.exceptions.RayError as error:
            raise BackendError(
                f"Ray did not start an actor for every rank: {error}; is Penstock installed on all "
                "nodes?"
            ) from None
        if names := places[0][1]:
            self.own_gpu = own_gpu_index(names[0])
        nodes = list(dict.fromkeys(node for node, _ in places))
        order = sorted(range(self._num_ranks), key=lambda index: nodes.index(places[index][0]))
        return [keepers[index] for index in order]

    def _watch(self, rank: int, keeper: Any) -> None:
        def wait() -> None:
            try:
                what = f"rank {rank} ended with code {self._ray.get(keeper.wait.remote())}"
            except self._ray.exceptions.RayError as error:
                what = f"rank {rank} ended with its node or its actor of Ray: {error}"
            if not self._is_stopping:
                self._on_death(what)

        threading.Thread(target=wait, name=f"actor of rank {rank}", daemon=True).start()
