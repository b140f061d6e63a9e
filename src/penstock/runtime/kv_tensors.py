"""The cache itself: a tensor per plane of a group of layers, handed to the layers as views."""

# L layers, B blocks; what a block holds is said by the layer's `CacheSpec`

import math
import mmap
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from penstock.runtime.cache_groups import LayerGroup
from penstock.runtime.host_blocks import HostBlocks
from penstock.types.step import CacheOp, CopyBlock, SwapIn, SwapOut


class KVTensors:
    def __init__(
        self,
        groups: Sequence[LayerGroup],
        num_blocks: Sequence[int],
        block_size: int,
        device: torch.device,
        num_host_blocks: Sequence[int] = (),
    ) -> None:
        self._groups: list[list[Tensor]] = []  # the planes of each group, [L, B, ...]
        for number, (group, num) in enumerate(zip(groups, num_blocks, strict=True)):
            self._groups.append([])
            for part in group.parts:
                shapes = part.spec.planes(block_size)
                planes = [
                    _zeros((len(part.layers), num, *p.shape), getattr(torch, p.dtype), device)
                    for p in shapes
                ]
                for at, layer in enumerate(part.layers):
                    layer.group, layer.num_parts = number, getattr(part.spec, "num_parts", 1)
                    layer.bind_cache(*(plane_LB[at] for plane_LB in planes))
                self._groups[-1] += planes
        # Of each group; none where nothing is swapped out.
        self._host = list(map(HostBlocks, self._groups, num_host_blocks))

    def apply(self, ops: Iterable[CacheOp]) -> None:
        """Run a plan's cache operations, in order; the host waits for none of them, but for host
        memory that is not there yet."""
        for op in ops:
            planes = self._groups[op.group]
            match op:
                case CopyBlock():
                    for plane_LB in planes:
                        plane_LB[:, op.dst].copy_(plane_LB[:, op.src])
                case SwapOut():
                    for plane_LB, host_L in zip(planes, self._host[op.group][op.dst], strict=True):
                        host_L.copy_(plane_LB[:, op.src], non_blocking=True)
                case SwapIn():
                    for plane_LB, host_L in zip(planes, self._host[op.group][op.src], strict=True):
                        plane_LB[:, op.dst].copy_(host_L, non_blocking=True)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, since a masked key times NaN is NaN. CPU pages are taken when first used, and small
    ones: a new block is a little of every layer, so of huge pages most would be cleared in vain."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)
