"""`RankMesh`: which ranks work together in which role. Starts and ends the process group.

Layers ask for a role ("attention", "mlp", "experts", "vocab"), never for tensor parallelism. Today
every role spans all ranks of the engine.
"""

import os
import sys
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

ROLES = ("attention", "mlp", "experts", "vocab")
SAMPLING_RANK = 0
_START_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True, slots=True)
class RoleGroup:
    """The ranks that share the work of one role; `group` is None when it is a single rank."""

    size: int
    rank: int
    group: dist.ProcessGroup | None = None


@dataclass(frozen=True, slots=True)
class RankMesh:
    rank: int
    size: int
    roles: dict[str, RoleGroup]

    @classmethod
    def single(cls) -> "RankMesh":
        return cls(0, 1, dict.fromkeys(ROLES, RoleGroup(1, 0)))

    @classmethod
    def create(cls, rank: int, size: int, init_address: str, device: torch.device) -> "RankMesh":
        """Meet the other ranks at `init_address` ("host:port"); returns when all are there."""
        assert 0 <= rank < size, (rank, size)
        if size == 1:
            return cls.single()
        on_gpu = device.type == "cuda"
        if not on_gpu and sys.platform == "linux":
            # CPU ranks share one machine; otherwise gloo resolves its host name, which may fail.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            init_method=f"tcp://{init_address}",
            rank=rank,
            world_size=size,
            timeout=_START_TIMEOUT,
            device_id=device if on_gpu else None,
        )
        return cls(rank, size, dict.fromkeys(ROLES, RoleGroup(size, rank, dist.group.WORLD)))

    @property
    def is_sampling_rank(self) -> bool:
        """Whether this rank chooses the tokens; the others receive them."""
        return self.rank == SAMPLING_RANK

    def role(self, name: str) -> RoleGroup:
        return self.roles[name]

    def close(self) -> None:
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()
