"""The cache itself: one tensor per group of layers, handed to the layers as views."""

# L layers, P planes of a layer, B blocks; what a block holds is said by the layer's `CacheSpec`

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from penstock.runtime.cache_groups import LayerGroup
from penstock.types.step import CacheOp


class KVTensors:
    def __init__(
        self,
        groups: Sequence[LayerGroup],
        num_blocks: Sequence[int],
        block_size: int,
        device: torch.device,
    ) -> None:
        self._groups: list[Tensor] = []
        for number, (group, num) in enumerate(zip(groups, num_blocks, strict=True)):
            spec = group.spec
            shape = (len(group.layers), spec.num_planes, num, *spec.block_shape(block_size))
            planes_LPB = _zeros(shape, getattr(torch, spec.dtype), device)
            for layer, planes_PB in zip(group.layers, planes_LPB, strict=True):
                layer.group = number
                layer.bind_cache(*planes_PB)
            self._groups.append(planes_LPB)

    def apply(self, ops: Iterable[CacheOp]) -> None:
        """Run a plan's cache operations, in order."""
        for op in ops:
            planes_LPB = self._groups[op.group]
            planes_LPB[:, :, op.dst].copy_(planes_LPB[:, :, op.src])


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, since a masked key times NaN is NaN. CPU pages are taken when first used."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)
