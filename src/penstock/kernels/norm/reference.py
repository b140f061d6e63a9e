"""The meaning of the norms, and one-call versions for the CPU.

Legend: T rows (any number of leading dimensions), D the normed dimension.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.op import cpu, op

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


@rms_norm.impl("torch", needs=cpu())
def rms_norm_torch(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """One fused call; its place of rounding is torch's."""
    return F.rms_norm(x_TD, weight_D.shape, weight_D, eps)


@add_rms_norm.impl("torch", needs=cpu())
def add_rms_norm_torch(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    residual_TD = x_TD + residual_TD
    return F.rms_norm(residual_TD, weight_D.shape, weight_D, eps), residual_TD
