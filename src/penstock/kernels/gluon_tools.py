"""What kernels in Gluon share: names that differ between versions, and descriptors of memory."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# Named differently by Triton 3.6 and later ones.
copy = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
view = getattr(gl.shared_memory_descriptor, "reinterpret", None) or (
    gl.shared_memory_descriptor._reinterpret
)


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
