"""`fp8_linear`: the GEMM of FP8 (E4M3) activations and weights, both with scales.

Legend: T tokens, I inputs, O outputs, G groups.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.op import op
from penstock.kernels.quantize.reference import BLOCK


@op(gpu_module="penstock.kernels.gemm.fp8_triton")
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
    y_TO = F.linear(x32, dequantized(weight_OI, weight_scale))
    return (y_TO if bias_O is None else y_TO + bias_O.float()).to(dtype)


def dequantized(weight_OI: Tensor, weight_scale: Tensor) -> Tensor:
    """The weight itself, in float32."""
    if weight_scale.dim() == 1:  # of one element, or one per output
        return weight_OI.float() * weight_scale[:, None]
    out_features, in_features = weight_OI.shape
    rows = weight_scale.repeat_interleave(BLOCK, dim=0)[:out_features]
    return weight_OI.float() * rows.repeat_interleave(BLOCK, dim=1)[:, :in_features]


def _spread(scale: Tensor, in_features: int) -> Tensor:
    """The scales of activations such that they can be multiplied with."""
    if scale.dim() == 1 or scale.shape[1] == 1:
        return scale
    return scale.repeat_interleave(in_features // scale.shape[1], dim=1)
