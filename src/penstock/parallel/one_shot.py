"""`OneShot`: sums of small tensors over the ranks of a node, which read each other's memory.

One kernel in place of NCCL's (`kernels.all_reduce`), in memory that torch makes visible to all
ranks (symmetric memory: over NVLink, or PCIe where GPUs reach each other). Each rank reads what all
of them have, R times the bytes, so it is for messages whose time is latency.
"""

# R ranks, T tokens, D hidden size

import hashlib
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import ConfigError

MAX_RANKS = 8
MAX_BYTES = 256 << 10  # above it NCCL; not measured
_MAX_TOKENS = 512
_INT32_BYTES = 4


class OneShot:
    """Made by all ranks of `group` at once; a `ConfigError` on all of them where it cannot be."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._rank, size = dist.get_rank(group), dist.get_world_size(group)
        if (why := _refusal(group, device)) is not None:
            raise ConfigError(f"allreduce_strategy is ONESHOT, but {why}; leave it out")
        import torch.distributed._symmetric_memory as symmetric

        num_bytes = MAX_BYTES + _MAX_TOKENS * size * _INT32_BYTES
        self._shared = symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
        handle = symmetric.rendezvous(self._shared, group.group_name)
        self._shared.zero_()
        torch.cuda.synchronize(device)
        dist.barrier(group=group)  # no flag is set before it is clear everywhere
        self._parts_R = torch.tensor(list(handle.buffer_ptrs), dtype=torch.int64, device=device)
        self._flags_R = self._parts_R + MAX_BYTES

    def fits(self, x: Tensor) -> bool:
        from penstock.kernels.all_reduce.triton import MAX_D

        return (
            x.dim() == 2
            and x.stride(1) == 1
            and x.shape[0] <= _MAX_TOKENS
            and x.shape[1] <= MAX_D
            and x.numel() * x.element_size() <= MAX_BYTES
        )

    def all_reduce(self, x_TD: Tensor) -> Tensor:
        return self._run(x_TD, None)[1]

    def all_reduce_add_rms_norm(
        self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return self._run(x_TD, (residual_TD, weight_D, eps))

    def _run(
        self, x_TD: Tensor, norm: tuple[Tensor, Tensor, float] | None
    ) -> tuple[Tensor, Tensor]:
        from penstock.kernels.all_reduce.triton import one_shot

        return one_shot(x_TD, self._parts_R, self._flags_R, self._rank, norm)


def _refusal(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Why the ranks cannot; the same on all of them."""
    size = dist.get_world_size(group)
    if size > MAX_RANKS:
        return f"{size} ranks share the sums, and at most {MAX_RANKS} can"
    digest = hashlib.sha256(Path("/proc/sys/kernel/random/boot_id").read_bytes()).digest()
    properties = torch.cuda.get_device_properties(device)
    seen = torch.cuda.device_count()
    reaches_all = all(
        torch.cuda.can_device_access_peer(device, other)
        for other in range(seen)
        if other != device.index
    )
    own = torch.tensor(
        [int.from_bytes(digest[:7], "little"), properties.major * 10, int(reaches_all)],
        device=device,
    )
    all_own = [torch.empty_like(own) for _ in range(size)]
    dist.all_gather(all_own, own, group=group)
    nodes, archs, reaches = torch.stack(all_own).T.tolist()
    if len(set(nodes)) > 1:
        return "the ranks that share sums are on several nodes"
    if min(archs) < 80:
        return "it needs GPUs of sm_80 or later"
    return None if all(reaches) else "the GPUs of this node do not reach each other's memory"
