"""References of the norms, and one-call CPU versions.

Legend: T rows (any number of leading dimensions), D the normed dimension.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.native import library
from penstock.kernels.op import cpu, native, op

_TRITON = "penstock.kernels.norm.triton"


@op(gpu_module=_TRITON)
def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Scale each row to unit root mean square, then by the weight, in fp32; back in x's dtype."""
    x32 = x_TD.float()
    x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (x32 * weight_D.float()).to(x_TD.dtype)


@op(gpu_module=_TRITON)
def add_rms_norm(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """(rms_norm(sum), sum) where sum = x + residual, rounded to x's dtype."""
    residual_TD = x_TD + residual_TD
    return rms_norm.reference(residual_TD, weight_D, eps), residual_TD


@rms_norm.impl(
    "native",
    needs=native(),
    fits=lambda x_TD, weight_D, eps: x_TD.dtype is torch.float32 and x_TD.dim() == 2,
)
def rms_norm_native(x_TD, weight_D, eps):
    if x_TD.stride(1) != 1:
        x_TD = x_TD.contiguous()
    num_rows, size = x_TD.shape
    out_TD = x_TD.new_empty((num_rows, size))
    library().rms_norm(  # type: ignore[union-attr]
        x_TD.data_ptr(), x_TD.stride(0), 0, 0, weight_D.data_ptr(), out_TD.data_ptr(),
        num_rows, size, eps,
    )  # fmt: skip
    return out_TD


@add_rms_norm.impl(
    "native",
    needs=native(),
    fits=lambda x_TD, residual_TD, weight_D, eps: x_TD.dtype is torch.float32 and x_TD.dim() == 2,
)
def add_rms_norm_native(x_TD, residual_TD, weight_D, eps):
    x_TD, residual_TD = x_TD.contiguous(), residual_TD.contiguous()
    num_rows, size = x_TD.shape
    both = x_TD.new_empty((2, num_rows, size))
    out_TD, sum_TD = both.unbind()
    library().rms_norm(  # type: ignore[union-attr]
        x_TD.data_ptr(), size, residual_TD.data_ptr(), sum_TD.data_ptr(), weight_D.data_ptr(),
        out_TD.data_ptr(), num_rows, size, eps,
    )  # fmt: skip
    return out_TD, sum_TD


@rms_norm.impl("torch", needs=cpu(), fits=lambda x_TD, weight_D, eps: x_TD.dtype is weight_D.dtype)
def rms_norm_torch(x_TD, weight_D, eps):
    """One fused call; its place of rounding is torch's."""
    return F.rms_norm(x_TD, weight_D.shape, weight_D, eps)


@add_rms_norm.impl(
    "torch",
    needs=cpu(),
    fits=lambda x_TD, residual_TD, weight_D, eps: x_TD.dtype is weight_D.dtype,
)
def add_rms_norm_torch(x_TD, residual_TD, weight_D, eps):
    residual_TD = x_TD + residual_TD
    return F.rms_norm(residual_TD, weight_D.shape, weight_D, eps), residual_TD
