"""The meaning of a gated product of a few tokens: gate and product are one op.

At a few tokens a small op of its own costs as much as its launch.

Legend: T tokens, I inputs, F features; 2F is the gate's features, then the up projection's.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.activation import silu_mul
from penstock.kernels.fp8.reference import fp8_linear, silu_mul_fp8
from penstock.kernels.op import op

MIN_TILES_TOKENS = 2  # one is quicker without tensor cores
MAX_GEMV_TOKENS = 2  # more are slower without them whatever the matrix
MAX_TOKENS = 64  # of a gated product; more keep the gate apart


@op(gpu_module="penstock.kernels.gemm.skinny")
def gated_linear(
    x_TI: Tensor,
    scale: Tensor | None,
    weight_2FI: Tensor,
    weight_scale: Tensor | None,
    bias_2F: Tensor | None,
    dtype: torch.dtype,
    out_scale_1: Tensor | None,
) -> Tensor:
    """silu(gate) * up of the product x W^T + b, which is rounded to `dtype` before.

    With scales, x and W hold 8-bit floats; x has one scale, or one per row ([T, 1]), W one, or one
    per output. With `out_scale_1` the result is 8-bit floats to be multiplied by it.
    """
    if scale is None or weight_scale is None:
        y_T2F = F.linear(x_TI, weight_2FI, bias_2F).to(dtype)
    else:
        y_T2F = fp8_linear.reference(x_TI, scale, weight_2FI, weight_scale, bias_2F, dtype)
    if out_scale_1 is None:
        return silu_mul.reference(y_T2F)
    return silu_mul_fp8.reference(y_T2F, out_scale_1, 0)[0]
