"""What kernels in Gluon share: names that differ between versions, the barriers and copies of a
warp-specialized pipeline, operands built from pairs, and TMA descriptors."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# Named differently by Triton 3.6 and later ones.
copy = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
view = getattr(gl.shared_memory_descriptor, "reinterpret", None) or (
    gl.shared_memory_descriptor._reinterpret
)

PANEL = gl.constexpr(64)  # inputs side by side in shared memory: 128 bytes, the widest swizzle


@gluon.jit
def pipeline_barriers(STAGES: gl.constexpr):
    """(full, empty): what the producer warp fills and what the consumer warps have read."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    return full, empty


@gluon.jit
def copy_panels(x_desc, x_panels, full, stage, x_row, tile):
    """A tile of 128 inputs of a block's tokens, in two panels."""
    for panel in gl.static_range(2):
        at = [x_row, (tile * 2 + panel) * PANEL]
        copy(x_desc, at, full.index(stage), x_panels.index(stage * 2 + panel))


@gluon.jit
def _bf16_pair(pairs):
    """Two bfloat16 in 32 bits, the lower one first."""
    low = pairs.to(gl.int16).to(gl.bfloat16, bitcast=True)
    high = (pairs >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True)
    return gl.join(low, high)


@gluon.jit
def slab_of_pairs(a, b, c, d, LAYOUT: gl.constexpr):
    """[64, 64], the left operand of a wgmma, of pairs [32, 16] of bfloat16 in 32 bits.

    `a` and `b` are two groups of 32 inputs of a slab's first half of rows, `c` and `d` of the
    second; words lie as in `moe.weights`. Each thread has what it needs already.
    """
    first, second = gl.join(_bf16_pair(a), _bf16_pair(b)), gl.join(_bf16_pair(c), _bf16_pair(d))
    # [warp, row, word / 4, word % 4, neighbor, group, half of the slab]
    parts = gl.join(first, second).reshape([4, 8, 4, 4, 2, 2, 2])
    parts = parts.permute([0, 6, 1, 5, 3, 2, 4])
    return gl.convert_layout(parts.reshape([64, 64]), LAYOUT, assert_trivial=True)


@dataclass(frozen=True, slots=True)
class _Address:
    """Stands for a tensor in a descriptor, which thus does not keep the tensor's memory."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


@functools.lru_cache(maxsize=4096)  # a few for each layer
def _descriptor(
    address: _Address,
    shape: tuple[int, ...],
    box: tuple[int, ...],
    layout: gl.NVMMASharedLayout,
) -> TensorDescriptor:
    strides = [1] if len(shape) == 1 else [shape[1], 1]
    return TensorDescriptor(address, list(shape), strides, list(box), layout)


def descriptor(
    tensor: Tensor, shape: tuple[int, ...], box: tuple[int, ...], layout: gl.NVMMASharedLayout
) -> TensorDescriptor:
    """Of the tensor's memory as numbers, or rows, one behind another; `box` is copied at once."""
    return _descriptor(_Address(tensor.data_ptr(), tensor.dtype), shape, box, layout)
