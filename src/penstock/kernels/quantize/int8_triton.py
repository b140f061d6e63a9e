"""Whole numbers of 8 bits on a GPU: one launch to make them; kernels or torch to multiply them.

Legend: T tokens, D channels, I inputs, O outputs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.int8.reference import int8_linear, quantize_int8
from penstock.kernels.int8.triton_gemv import gemv
from penstock.kernels.int8.triton_parts import add_up
from penstock.kernels.int8.triton_tiles import is_quicker, tiles
from penstock.kernels.op import arch
from penstock.kernels.pdl import launch_options, let_next_start, wait_for_previous

_COLUMNS = 4096  # of a row in one pass
_MAX_GEMV_TOKENS = 2
_GEMV_MULTIPLE = 16  # inputs: rows begin where words of 16 bytes do
_INT_MM_MULTIPLE = 8  # inputs and outputs


@triton.jit
def _quantize(
    x_ptr, out_ptr, scale_ptr, stride_t, SIZE,
    IS_STATIC: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out = round(x / scale), one program per row; not static: scale = max(|row|) / 127."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride_t
    if IS_STATIC:
        scale = tl.load(scale_ptr)
    else:
        largest = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, SIZE, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + cols, mask=cols < SIZE, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.abs(x))
        scale = tl.div_rn(tl.maximum(tl.max(largest, axis=0), 1e-12), 127.0)
        tl.store(scale_ptr + row, scale)
    for start in range(0, SIZE, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + cols, mask=cols < SIZE, other=0.0).to(tl.float32)
        # Divided exactly, or numbers between two would fall to either. Adding and taking away
        # 1.5 * 2^23 leaves a whole number, the even one of two.
        x = tl.minimum(tl.maximum(tl.div_rn(x, tl.zeros_like(x) + scale), -127.0), 127.0)
        rounded = (x + 12582912.0) - 12582912.0
        tl.store(out_ptr + row * SIZE + cols, rounded.to(tl.int8), mask=cols < SIZE)


@quantize_int8.impl("triton", needs=arch(80), fits=lambda x_TD, scale_1: x_TD.dim() == 2)
def quantize_int8_triton(x_TD: Tensor, scale_1: Tensor | None) -> tuple[Tensor, Tensor]:
    assert x_TD.stride(1) == 1, x_TD.stride()
    num_rows, size = x_TD.shape
    out_TD = torch.empty((num_rows, size), dtype=torch.int8, device=x_TD.device)
    scale = scale_1
    if scale is None:
        scale = torch.empty((num_rows, 1), dtype=torch.float32, device=x_TD.device)
    if num_rows:
        block = min(triton.next_power_of_2(size), _COLUMNS)
        _quantize[(num_rows,)](
            x_TD, out_TD, scale, x_TD.stride(0), size, IS_STATIC=scale_1 is not None, BLOCK=block,
            num_warps=max(1, min(16, block // 512)), **launch_options(x_TD),
        )  # fmt: skip
    return out_TD, scale


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
        not is_quicker(*x_TI.shape)
        and weight_OI.shape[0] % _INT_MM_MULTIPLE == weight_OI.shape[1] % _INT_MM_MULTIPLE == 0
    ),
)
def int8_linear_int_mm(
    x_TI: Tensor,
    scale: Tensor,
    weight_OI: Tensor,
    weight_scale: Tensor,
    bias_O: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    sums_TO = torch._int_mm(x_TI, weight_OI.t())
    return add_up(sums_TO[None], scale, weight_scale, bias_O, dtype)


int8_linear.impl("tiles", needs=arch(80))(tiles)
