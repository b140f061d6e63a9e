"""INT8 quantization of activations on a GPU, one launch.

Legend: T tokens, D channels.
"""

import torch
import triton.language as tl

from penstock.kernels.launch import jit
from penstock.kernels.op import arch
from penstock.kernels.pdl import launch_options, let_next_start, wait_for_previous
from penstock.kernels.quantize.reference import quantize_int8
from penstock.kernels.sizes import next_power_of_2
from penstock.kernels.triton_math import round_to_even

_COLUMNS = 4096  # of a row in one pass


@jit
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
        # Divided exactly, or values halfway between two would fall to either.
        x = tl.minimum(tl.maximum(tl.div_rn(x, tl.zeros_like(x) + scale), -127.0), 127.0)
        tl.store(out_ptr + row * SIZE + cols, round_to_even(x).to(tl.int8), mask=cols < SIZE)


@quantize_int8.impl("triton", needs=arch(80), fits=lambda x_TD, scale_1: x_TD.dim() == 2)
def quantize_int8_triton(x_TD, scale_1):
    assert x_TD.stride(1) == 1, x_TD.stride()
    num_rows, size = x_TD.shape
    out_TD = torch.empty((num_rows, size), dtype=torch.int8, device=x_TD.device)
    scale = scale_1
    if scale is None:
        scale = torch.empty((num_rows, 1), dtype=torch.float32, device=x_TD.device)
    if num_rows:
        block = min(next_power_of_2(size), _COLUMNS)
        _quantize[(num_rows,)](
            x_TD, out_TD, scale, x_TD.stride(0), size, IS_STATIC=scale_1 is not None, BLOCK=block,
            num_warps=max(1, min(16, block // 512)), **launch_options(x_TD),
        )  # fmt: skip
    return out_TD, scale
