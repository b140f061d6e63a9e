"""The meaning of the ops on 8-bit floats (e4m3, largest value 448, no infinity).

A matrix is its values times scales in float32. Activations have one scale for all ([1]; static, it
comes with the checkpoint), one per row ([T, 1]) or one per row and group of channels ([T, G], laid
out group by group, as matrix units read them). Weights have one for all ([1]), one per output ([O])
or one per block of 128 x 128 ([O / 128, I / 128], rounded up).

What is quantised is the float32 result of the op, not that result rounded to the model's dtype.

Legend: T tokens, D channels, F features, I inputs, O outputs, G groups.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.op import op

BLOCK = 128  # rows and columns of a weight that share a scale, where scales are per block
LARGEST = 448.0
_SMALLEST_AMAX = 1e-12  # a row of zeros has a scale, too

_TRITON = "penstock.kernels.fp8.triton"


@op(gpu_module=_TRITON)
def quantize_fp8(x_TD: Tensor, scale_1: Tensor | None, group: int) -> tuple[Tensor, Tensor]:
    """(values, scales): by the given scale; without one, by the largest of a row or (group > 0) of
    each `group` channels. What is too large becomes the largest there is."""
    return _quantized(x_TD.float(), scale_1, group)


@op(gpu_module=_TRITON)
def rms_norm_fp8(
    x_TD: Tensor,
    residual_TD: Tensor | None,
    weight_D: Tensor,
    eps: float,
    scale_1: Tensor | None,
    group: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """(values, scales, sum): the norm of the sum x + residual, quantised, and the sum, rounded to
    x's dtype. Without a residual the sum is x itself."""
    sum_TD = x_TD if residual_TD is None else x_TD + residual_TD
    sum32 = sum_TD.float()
    normed = sum32 * torch.rsqrt(sum32.square().mean(-1, keepdim=True) + eps) * weight_D.float()
    return *_quantized(normed, scale_1, group), sum_TD


@op(gpu_module=_TRITON)
def silu_mul_fp8(x_T2F: Tensor, scale_1: Tensor | None, group: int) -> tuple[Tensor, Tensor]:
    """(values, scales) of silu(gate) * up."""
    gate_TF, up_TF = x_T2F.float().chunk(2, dim=-1)
    return _quantized(F.silu(gate_TF) * up_TF, scale_1, group)


@op(gpu_module=_TRITON)
def fp8_linear(
    x_TI: Tensor,
    scale: Tensor,
    weight_OI: Tensor,
    weight_scale: Tensor,
    bias_O: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """(x * scale) (weight * weight_scale)^T + bias, in float32, rounded to `dtype`."""
    x32 = x_TI.float() * _spread(scale, x_TI.shape[1])
    y_TO = F.linear(x32, weight_values(weight_OI, weight_scale))
    return (y_TO if bias_O is None else y_TO + bias_O.float()).to(dtype)


def weight_values(weight_OI: Tensor, weight_scale: Tensor) -> Tensor:
    """The weight itself, in float32."""
    if weight_scale.dim() == 1:  # of one element, or one per output
        return weight_OI.float() * weight_scale[:, None]
    num_outputs, num_inputs = weight_OI.shape
    rows = weight_scale.repeat_interleave(BLOCK, dim=0)[:num_outputs]
    return weight_OI.float() * rows.repeat_interleave(BLOCK, dim=1)[:, :num_inputs]


def _spread(scale: Tensor, num_inputs: int) -> Tensor:
    """The scales of activations such that they can be multiplied with."""
    if scale.dim() == 1 or scale.shape[1] == 1:
        return scale
    return scale.repeat_interleave(num_inputs // scale.shape[1], dim=1)


def _quantized(x_TD: Tensor, scale_1: Tensor | None, group: int) -> tuple[Tensor, Tensor]:
    if scale_1 is not None:
        return _rounded(x_TD / scale_1), scale_1
    num_rows, size = x_TD.shape
    assert group == 0 or size % group == 0, (size, group)
    x_TGD = x_TD.view(num_rows, -1, group or size)
    scale_TG1 = x_TGD.abs().amax(-1, keepdim=True).clamp(min=_SMALLEST_AMAX) / LARGEST
    scale_TG = scale_TG1.squeeze(-1)
    return _rounded(x_TGD / scale_TG1).view(num_rows, size), scale_TG.t().contiguous().t()


def _rounded(x: Tensor) -> Tensor:
    return x.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
