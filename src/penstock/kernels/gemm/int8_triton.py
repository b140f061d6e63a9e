"""INT8 GEMM on a GPU: a GEMV, a GEMM on tensor cores, and torch's `_int_mm` where it is faster.

Legend: T tokens, I inputs, O outputs.
"""

import torch

from penstock.kernels.gemm.int8 import int8_linear
from penstock.kernels.gemm.int8_epilogue import reduce_split_k
from penstock.kernels.gemm.int8_gemv import gemv
from penstock.kernels.gemm.int8_tiled import int8_gemm, is_faster_than_int_mm
from penstock.kernels.op import arch

_MAX_GEMV_TOKENS = 2
_GEMV_MULTIPLE = 16  # of in_features: rows are 16-byte aligned
_INT_MM_MULTIPLE = 8  # of in_features and out_features


int8_linear.impl(
    "gemv",
    needs=arch(80),
    fits=lambda x_TI, *_: (
        0 < x_TI.shape[0] <= _MAX_GEMV_TOKENS and x_TI.shape[1] % _GEMV_MULTIPLE == 0
    ),
)(gemv)


@int8_linear.impl(
    "int_mm",
    needs=arch(80),
    fits=lambda x_TI, scale, weight_OI, *_: (
        not is_faster_than_int_mm(*x_TI.shape)
        and weight_OI.shape[0] % _INT_MM_MULTIPLE == weight_OI.shape[1] % _INT_MM_MULTIPLE == 0
    ),
)
def int8_linear_int_mm(x_TI, scale, weight_OI, weight_scale, bias_O, dtype):
    sums_TO = torch._int_mm(x_TI, weight_OI.t())
    return reduce_split_k(sums_TO[None], scale, weight_scale, bias_O, dtype)


int8_linear.impl("triton", needs=arch(80))(int8_gemm)
