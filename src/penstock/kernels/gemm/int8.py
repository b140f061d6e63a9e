"""The meaning of the ops on whole numbers of 8 bits (-127 to 127); a CPU version of the product.

A matrix is its values times scales in float32. Activations have one scale for all ([1]; static, it
comes with the checkpoint) or one per row ([T, 1]), weights one for all ([1]) or one per output
([O]).

Legend: T tokens, D channels, I inputs, O outputs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.op import cpu, op

LARGEST = 127.0
_SMALLEST_AMAX = 1e-12  # a row of zeros has a scale, too

_TRITON = "penstock.kernels.int8.triton"


@op(gpu_module=_TRITON)
def quantize_int8(x_TD: Tensor, scale_1: Tensor | None) -> tuple[Tensor, Tensor]:
    """(values, scales): by the given scale; without one, by the largest of a row."""
    x32 = x_TD.float()
    scale = scale_1
    if scale is None:
        scale = x32.abs().amax(-1, keepdim=True).clamp(min=_SMALLEST_AMAX) / LARGEST
    return (x32 / scale).round().clamp(-LARGEST, LARGEST).to(torch.int8), scale


@op(gpu_module=_TRITON)
def int8_linear(
    x_TI: Tensor,
    scale: Tensor,
    weight_OI: Tensor,
    weight_scale: Tensor,
    bias_O: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """(x * scale) (weight * weight_scale)^T + bias, in float32, rounded to `dtype`."""
    y_TO = F.linear(x_TI.float(), weight_OI.float())
    return scaled(y_TO, scale, weight_scale, bias_O, dtype)


def scaled(
    y_TO: Tensor, scale: Tensor, weight_scale: Tensor, bias_O: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Products of whole numbers, times what these stand for."""
    y_TO = y_TO.float() * scale * weight_scale
    return (y_TO if bias_O is None else y_TO + bias_O.float()).to(dtype)


@int8_linear.impl("torch", needs=cpu())
def int8_linear_int_mm(
    x_TI: Tensor,
    scale: Tensor,
    weight_OI: Tensor,
    weight_scale: Tensor,
    bias_O: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    return scaled(torch._int_mm(x_TI, weight_OI.t()), scale, weight_scale, bias_O, dtype)
