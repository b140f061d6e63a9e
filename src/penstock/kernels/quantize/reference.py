"""Quantization of activations, alone or fused with the previous op: FP8 (E4M3) and INT8.

A matrix is its values times scales in float32. Activations have one scale for all ([1]; static, it
comes with the checkpoint), one per row ([T, 1]) or one per row and group of channels ([T, G], laid
out group by group, as tensor cores read them). Weights have one for all ([1]), one per output ([O])
or one per block of 128 x 128 ([O / 128, I / 128], rounded up).

What is quantized is the float32 result of the op, not that result rounded to the model's dtype.

Legend: T tokens, D channels, F features, I inputs, O outputs, G groups.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.op import op

BLOCK = 128  # rows and columns of a weight that share a scale, where scales are per block
FP8_MAX = 448.0  # E4M3 has no infinity
INT8_MAX = 127.0
_MIN_AMAX = 1e-12  # a row of zeros has a scale, too

_FP8 = "penstock.kernels.quantize.fp8_triton"


@op(gpu_module=_FP8)
def quantize_fp8(x_TD: Tensor, scale_1: Tensor | None, group: int) -> tuple[Tensor, Tensor]:
    """(values, scales): by the given scale; without one, by the largest of a row or (group > 0) of
    each `group` channels. What is too large becomes the largest there is."""
    return _quantized(x_TD.float(), scale_1, group)


@op(gpu_module=_FP8)
def rms_norm_fp8(
    x_TD: Tensor,
    residual_TD: Tensor | None,
    weight_D: Tensor,
    eps: float,
    scale_1: Tensor | None,
    group: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """(values, scales, sum): the norm of the sum x + residual, quantized, and the sum, rounded to
    x's dtype. Without a residual the sum is x itself."""
    sum_TD = x_TD if residual_TD is None else x_TD + residual_TD
    sum32 = sum_TD.float()
    normed = sum32 * torch.rsqrt(sum32.square().mean(-1, keepdim=True) + eps) * weight_D.float()
    return *_quantized(normed, scale_1, group), sum_TD


@op(gpu_module=_FP8)
def silu_mul_fp8(x_T2F: Tensor, scale_1: Tensor | None, group: int) -> tuple[Tensor, Tensor]:
    """(values, scales) of silu(gate) * up."""
    gate_TF, up_TF = x_T2F.float().chunk(2, dim=-1)
    return _quantized(F.silu(gate_TF) * up_TF, scale_1, group)


@op(gpu_module="penstock.kernels.quantize.int8_triton")
def quantize_int8(x_TD: Tensor, scale_1: Tensor | None) -> tuple[Tensor, Tensor]:
    """(values, scales): by the given scale; without one, by the largest of a row."""
    x32 = x_TD.float()
    scale = scale_1
    if scale is None:
        scale = x32.abs().amax(-1, keepdim=True).clamp(min=_MIN_AMAX) / INT8_MAX
    return (x32 / scale).round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8), scale


def _quantized(x_TD: Tensor, scale_1: Tensor | None, group: int) -> tuple[Tensor, Tensor]:
    if scale_1 is not None:
        return _rounded(x_TD / scale_1), scale_1
    num_rows, size = x_TD.shape
    assert group == 0 or size % group == 0, (size, group)
    x_TGD = x_TD.view(num_rows, -1, group or size)
    scale_TG1 = x_TGD.abs().amax(-1, keepdim=True).clamp(min=_MIN_AMAX) / FP8_MAX
    scale_TG = scale_TG1.squeeze(-1)
    return _rounded(x_TGD / scale_TG1).view(num_rows, size), scale_TG.t().contiguous().t()


def _rounded(x: Tensor) -> Tensor:
    return x.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
