"""The cache itself: one tensor for all layers of a group, handed to the layers as views."""

# L layers, B blocks, K kv heads, S tokens per block, D head size

import math
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from penstock.layers.attention import Attention
from penstock.types.step import CacheOp


def bytes_per_block(layers: Iterable[Attention], block_size: int) -> int:
    """What one block of every layer takes on this rank."""
    return sum(layer.cache_spec().bytes_per_token() * block_size for layer in layers)


class KVTensors:
    def __init__(
        self, layers: list[Attention], num_blocks: int, block_size: int, device: torch.device
    ) -> None:
        spec = layers[0].cache_spec()
        assert all(layer.cache_spec() == spec for layer in layers), "one cache group today"
        shape = (len(layers), 2, num_blocks, spec.num_kv_heads, block_size, spec.head_size)
        self._kv_L2BKSD = _zeros(shape, getattr(torch, spec.dtype), device)
        for layer, kv_2BKSD in zip(layers, self._kv_L2BKSD, strict=True):
            layer.bind_cache(kv_2BKSD[0], kv_2BKSD[1])

    def apply(self, ops: Iterable[CacheOp]) -> None:
        """Run a plan's cache operations, in order."""
        for op in ops:
            self._blocks(op.dst).copy_(self._blocks(op.src))

    def _blocks(self, block: int) -> Tensor:
        return self._kv_L2BKSD[:, :, block]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, since a masked key times NaN is NaN. CPU pages are taken when first used."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)
