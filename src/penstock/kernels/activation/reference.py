"""References of the gated activations, and a CPU version without the fp32 detour.

Legend: T tokens, F features; 2F is the gate's features, then the up projection's; H heads, D head
size.
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


@op(gpu_module="penstock.kernels.activation.triton")
def gelu_mul(x_T2F: Tensor) -> Tensor:
    """gelu(gate) * up with GELU's approximation by tanh, in fp32, back in x's dtype."""
    gate_TF, up_TF = x_T2F.chunk(2, dim=-1)
    return (F.gelu(gate_TF.float(), approximate="tanh") * up_TF.float()).to(x_T2F.dtype)


@op(gpu_module="penstock.kernels.activation.triton")
def sigmoid_mul(x_THD: Tensor, gate_THD: Tensor) -> Tensor:
    """x * sigmoid(gate), in fp32, back in x's dtype; heads of the gate may lie apart."""
    return (x_THD.float() * torch.sigmoid(gate_THD.float())).to(x_THD.dtype)


@silu_mul.impl(
    "native",
    needs=native(),
    fits=lambda x_T2F: x_T2F.dtype is torch.float32 and x_T2F.dim() == 2,
)
def silu_mul_native(x_T2F):
    if x_T2F.stride(1) != 1:
        x_T2F = x_T2F.contiguous()
    num_rows, size = x_T2F.shape[0], x_T2F.shape[1] // 2
    out_TF = x_T2F.new_empty((num_rows, size))
    library().silu_mul(  # type: ignore[union-attr]
        x_T2F.data_ptr(), x_T2F.stride(0), out_TF.data_ptr(), num_rows, size
    )
    return out_TF


@silu_mul.impl("torch", needs=cpu())
def silu_mul_torch(x_T2F):
    """In x's dtype, without a third tensor."""
    gate_TF, up_TF = x_T2F.chunk(2, dim=-1)
    return F.silu(gate_TF).mul_(up_TF)


@gelu_mul.impl("torch", needs=cpu(), fits=lambda x_T2F: x_T2F.dtype is torch.float32)
def gelu_mul_torch(x_T2F):
    """Without copies of both halves."""
    gate_TF, up_TF = x_T2F.chunk(2, dim=-1)
    return F.gelu(gate_TF, approximate="tanh").mul_(up_TF)


@sigmoid_mul.impl("torch", needs=cpu(), fits=lambda x_THD, gate_THD: x_THD.dtype is torch.float32)
def sigmoid_mul_torch(x_THD, gate_THD):
    return torch.sigmoid(gate_THD).mul_(x_THD)
