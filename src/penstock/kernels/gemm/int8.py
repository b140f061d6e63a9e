"""`int8_linear`: the GEMM of INT8 activations and weights (W8A8), both with scales.

Legend: T tokens, I inputs, O outputs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.op import cpu, op


@op(gpu_module="penstock.kernels.gemm.int8_triton")
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
    """Dequantize an INT32 accumulator and add the bias."""
    y_TO = y_TO.float() * scale * weight_scale
    return (y_TO if bias_O is None else y_TO + bias_O.float()).to(dtype)


@int8_linear.impl("torch", needs=cpu())
def int8_linear_int_mm(x_TI, scale, weight_OI, weight_scale, bias_O, dtype):
    return scaled(torch._int_mm(x_TI, weight_OI.t()), scale, weight_scale, bias_O, dtype)
