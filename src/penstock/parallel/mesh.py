"""`RankMesh`: one rank's place in the mesh of named axes. Starts and ends the process groups.

Layers ask for a role, never for tensor parallelism; a role is a set of axes. Attention is sharded
over tp, the vocabulary over cp and tp. MLPs and experts are sharded over all ranks of a stage:
where these have other tokens (dp, and cp in prompts), the tokens of all come together in front of
an MLP and part behind it.
"""

import os
import socket
import sys
from collections.abc import Collection
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from penstock.parallel.one_shot import OneShot
from penstock.types.mesh import ATTENTION_AXES, EXPERT_AXES, MeshShape

ROLES = {
    "attention": ("tp",),
    "vocab": ("cp", "tp"),
    "mlp": ATTENTION_AXES,
    "experts": EXPERT_AXES,
    "tokens": ("dp",),  # ranks with tokens of their own
    "context": ("cp",),  # ranks that share the tokens of a sequence
    "copies": ("cp", "tp"),  # ranks that decode the same tokens
}
# Roles whose ranks send each other anything.
_SENDING = ("attention", "vocab", "tokens", "context", "copies")
_START_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True, slots=True)
class RoleGroup:
    """The ranks that share the work of one role; `group` is None when nothing is sent. `one_shot`:
    another way for their small sums."""

    size: int
    rank: int
    group: dist.ProcessGroup | None = None
    one_shot: OneShot | None = None


@dataclass(frozen=True, slots=True)
class RankMesh:
    rank: int
    shape: MeshShape
    roles: dict[str, RoleGroup]

    @classmethod
    def single(cls) -> "RankMesh":
        return cls.place(0, MeshShape())

    @classmethod
    def place(cls, rank: int, shape: MeshShape) -> "RankMesh":
        """Where `rank` is and what it holds, without the processes of the others."""
        groups = {role: shape.group(axes, rank) for role, axes in ROLES.items()}
        roles = {role: RoleGroup(len(own), own.index(rank)) for role, own in groups.items()}
        return cls(rank, shape, roles)

    @classmethod
    def create(
        cls,
        rank: int,
        shape: MeshShape,
        init_address: str,
        device: torch.device,
        lone_roles: Collection[str] = (),
        listener: socket.socket | None = None,
        with_one_shot: bool = False,
    ) -> "RankMesh":
        """Meet the other ranks at `init_address` ("host:port"); returns when all are there.

        `lone_roles`: roles that go through a process group even where it is a single rank: so one
        GPU runs what several would launch. `listener`: of rank 0, which listens at that address.
        `with_one_shot`: for small sums over the ranks of attention, a lone one too.
        """
        mesh = cls.place(rank, shape)
        if with_one_shot:
            lone_roles = {"attention", *lone_roles}
        if shape.size == 1 and not lone_roles:
            return mesh
        on_gpu = device.type == "cuda"
        if not on_gpu and sys.platform == "linux":
            # Unless they are on several machines; gloo would resolve its host name, which may fail.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if with_one_shot:
            # The kernel reads each rank's memory by its address. What torch sets up beside that,
            # through the switch, is not needed, and fails or hangs where the driver refuses it.
            os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        host, _, port = init_address.rpartition(":")
        # Not by the address: within torchrun that would mean the store of its agent.
        store = dist.TCPStore(
            host,
            int(port),
            shape.size,
            is_master=rank == 0,
            timeout=_START_TIMEOUT,
            master_listen_fd=None if listener is None else listener.detach(),
        )
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=store,
            rank=rank,
            world_size=shape.size,
            timeout=_START_TIMEOUT,
            device_id=device if on_gpu else None,
        )
        roles = mesh.roles | _meet(mesh, lone_roles)
        ranks = roles["attention"]
        if with_one_shot and ranks.group is not None:
            roles["attention"] = replace(ranks, one_shot=OneShot(ranks.group, device))
        return cls(rank, shape, roles)

    @property
    def is_sampling_rank(self) -> bool:
        """Whether this rank chooses tokens; the others of its role `vocab` receive them."""
        return self.shape.is_sampling_rank(self.rank)

    @property
    def is_last_stage(self) -> bool:
        return self.coordinate("pp") == self.shape.pp - 1

    @property
    def own_stage(self) -> "RankMesh":
        """The ranks with the same layers as this one, for a model that has no others."""
        rank = self.rank % self.shape.stage_size
        return RankMesh(rank, replace(self.shape, pp=1), self.roles)

    def role(self, name: str) -> RoleGroup:
        return self.roles[name]

    def coordinate(self, axis: str) -> int:
        return self.shape.coordinate(axis, self.rank)

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def use_interface(name: str | None, is_asked: bool) -> None:
    """For the collectives. What the user has set for these libraries stays. NCCL knows better
    than we which interfaces to take, unless one is asked for."""
    if name is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        if is_asked:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def _meet(mesh: RankMesh, lone_roles: Collection[str]) -> dict[str, RoleGroup]:
    """The roles that send, with their process groups; every rank makes all of them, in order."""
    made: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup | None] = {}
    found = {}
    for role in _SENDING:
        own = mesh.role(role)
        if own.size == 1 and role not in lone_roles:
            continue
        groups = mesh.shape.groups(ROLES[role])
        if groups not in made:
            made[groups] = dist.group.WORLD
            if own.size < mesh.shape.size:
                made[groups], _ = dist.new_subgroups_by_enumeration(list(map(list, groups)))
        found[role] = RoleGroup(own.size, own.rank, made[groups])
    return found
