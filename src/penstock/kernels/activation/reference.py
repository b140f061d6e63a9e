"""The meaning of the gated activations, and a CPU version without the fp32 detour.

Legend: T tokens, F features; 2F is the gate's features, then the up projection's.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.native import library
from penstock.kernels.op import cpu, native, op


@op(gpu_module="penstock.kernels.activation.triton")
def silu_mul(x_T2F: Tensor) -> Tensor:
    """silu(gate) * up, in fp32, back in x's dtype."""
    gate_TF, up_TF = x_T2F.chunk(2, dim=-1)
    return (F.silu(gate_TF.float()) * up_TF.float()).to(x_T2F.dtype)


@silu_mul.impl(
    "native",
    needs=native(),
    fits=lambda x_T2F: x_T2F.dtype is torch.float32 and x_T2F.dim() == 2,
)
def silu_mul_native(x_T2F: Tensor) -> Tensor:
    if x_T2F.stride(1) != 1:
        x_T2F = x_T2F.contiguous()
    num_rows, size = x_T2F.shape[0], x_T2F.shape[1] // 2
    out_TF = x_T2F.new_empty((num_rows, size))
    library().silu_mul(  # type: ignore[union-attr]
        x_T2F.data_ptr(), x_T2F.stride(0), out_TF.data_ptr(), num_rows, size
    )
    return out_TF


@silu_mul.impl("torch", needs=cpu())
def silu_mul_torch(x_T2F: Tensor) -> Tensor:
    """In x's dtype, without a third tensor."""
    gate_TF, up_TF = x_T2F.chunk(2, dim=-1)
    return F.silu(gate_TF).mul_(up_TF)
