"""`gated_linear`: the gate_up GEMM with SiLU and multiply fused into its epilogue, for small M.

At small M an activation kernel of its own costs as much as its launch.

Legend: T tokens, I inputs, F features; 2F is the gate's features, then the up projection's.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.activation import silu_mul
from penstock.kernels.gemm.fp8 import fp8_linear
from penstock.kernels.op import op
from penstock.kernels.quantize.reference import silu_mul_fp8

MIN_SMALL_M_TOKENS = 2  # one is faster without tensor cores
MAX_GEMV_TOKENS = 2  # more are slower without them, whatever the matrix
MAX_TOKENS = 64  # of the fused GEMM; more have an activation kernel


@op(gpu_module="penstock.kernels.gemm.gemv")
def gated_linear(
    x_TI: Tensor,
    scale: Tensor | None,
    weight_2FI: Tensor,
    weight_scale: Tensor | None,
    bias_2F: Tensor | None,
    dtype: torch.dtype,
    out_scale_1: Tensor | None,
) -> Tensor:
    """silu(gate) * up of x W^T + b, which is rounded to `dtype` before.

    With scales, x and W are FP8; x has one scale, or one per row ([T, 1]), W one, or one per
    output. With `out_scale_1` the output is FP8 with that scale (fused quantization).
    """
    if scale is None or weight_scale is None:
        y_T2F = F.linear(x_TI, weight_2FI, bias_2F).to(dtype)
    else:
        y_T2F = fp8_linear.reference(x_TI, scale, weight_2FI, weight_scale, bias_2F, dtype)
    if out_scale_1 is None:
        return silu_mul.reference(y_T2F)
    return silu_mul_fp8.reference(y_T2F, out_scale_1, 0)[0]
