"""What ranks of a role do together. Each is the identity when the role is a single rank."""

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.parallel.mesh import SAMPLING_RANK, RoleGroup


def all_reduce(x: Tensor, role: RoleGroup) -> Tensor:
    """Sum over the ranks; `x` itself is overwritten and returned."""
    if role.size > 1:
        dist.all_reduce(x, group=role.group)
    return x


def all_gather(x: Tensor, role: RoleGroup) -> Tensor:
    """Every rank's `x`, contiguous, joined along the last dimension in rank order."""
    if role.size == 1:
        return x
    parts = [torch.empty_like(x) for _ in range(role.size)]
    dist.all_gather(parts, x, group=role.group)
    return torch.cat(parts, dim=-1)


def broadcast(x: Tensor, role: RoleGroup) -> Tensor:
    """The sampling rank's `x` on every rank; elsewhere `x` is overwritten and returned."""
    if role.size > 1:
        dist.broadcast(x, SAMPLING_RANK, group=role.group)
    return x
