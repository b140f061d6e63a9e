"""MXFP8 and NVFP4 quantization of activations on a GPU, one launch each.

Legend: T tokens, D channels.
"""

import torch
import triton.language as tl

from penstock.kernels.launch import jit
from penstock.kernels.op import arch
from penstock.kernels.pdl import launch_options, let_next_start, wait_for_previous
from penstock.kernels.quantize.block_scaled import (
    MXFP8_GROUP,
    quantize_mxfp8,
    quantize_nvfp4,
)
from penstock.kernels.quantized_weight import FP4_GROUP
from penstock.kernels.sizes import cdiv
from penstock.kernels.triton_math import fp8_clamp, nvfp4_pairs

_COLUMNS = 1024  # of one program


@jit
def _mxfp8(
    x_ptr, out_ptr, powers_ptr, stride_t, SIZE,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per (row, block of columns)."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    x = tl.load(x_ptr + row * stride_t + columns, mask=inside, other=0.0).to(tl.float32)
    x = tl.reshape(x, (BLOCK // GROUP, GROUP))
    largest = tl.max(tl.abs(x), axis=1)
    bits = tl.div_rn(largest, tl.full((BLOCK // GROUP,), 448.0, tl.float32)).to(
        tl.int32, bitcast=True
    )
    power = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
    factor = ((254 - power) << 23).to(tl.float32, bitcast=True)
    values = tl.reshape(fp8_clamp(x * factor[:, None]), (BLOCK,))
    tl.store(out_ptr + row * SIZE + columns, values.to(tl.float8e4nv), mask=inside)
    groups = tl.program_id(1) * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    num_groups = SIZE // GROUP
    at = powers_ptr + row * num_groups + groups
    tl.store(at, power.to(tl.uint8), mask=groups < num_groups)


@jit
def _nvfp4(
    x_ptr, scale_ptr, out_ptr, scales_ptr, stride_t, SIZE,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per (row, block of columns)."""
    let_next_start(PDL)
    outer = tl.load(scale_ptr)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride_t + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
    found, code = nvfp4_pairs(tl.reshape(x, (BLOCK // GROUP, GROUP)), outer)
    pairs = tl.program_id(1) * (BLOCK // 2) + tl.arange(0, BLOCK // 2)
    at = out_ptr + row * (SIZE // 2) + pairs
    tl.store(at, tl.reshape(found, (BLOCK // 2,)), mask=pairs < SIZE // 2)
    groups = tl.program_id(1) * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    num_groups = SIZE // GROUP
    at = scales_ptr + row * num_groups + groups
    tl.store(at, code, mask=groups < num_groups)


@quantize_mxfp8.impl("triton", needs=arch(89), fits=lambda x_TD: x_TD.shape[0] > 0)
def quantize_mxfp8_triton(x_TD):
    num_rows, size = x_TD.shape
    assert x_TD.stride(1) == 1 and size % MXFP8_GROUP == 0, (x_TD.stride(), size)
    out_TD = torch.empty((num_rows, size), dtype=torch.float8_e4m3fn, device=x_TD.device)
    shape = (num_rows, size // MXFP8_GROUP)
    powers_TG = torch.empty(shape, dtype=torch.uint8, device=x_TD.device)
    _mxfp8[(num_rows, cdiv(size, _COLUMNS))](
        x_TD, out_TD, powers_TG, x_TD.stride(0), size, GROUP=MXFP8_GROUP, BLOCK=_COLUMNS,
        num_warps=4, **launch_options(x_TD),
    )  # fmt: skip
    return out_TD, powers_TG


@quantize_nvfp4.impl("triton", needs=arch(80), fits=lambda x_TD, scale_1: x_TD.shape[0] > 0)
def quantize_nvfp4_triton(x_TD, scale_1):
    num_rows, size = x_TD.shape
    assert x_TD.stride(1) == 1 and size % FP4_GROUP == 0, (x_TD.stride(), size)
    codes_TB = torch.empty((num_rows, size // 2), dtype=torch.uint8, device=x_TD.device)
    scales_TG = torch.empty((num_rows, size // FP4_GROUP), dtype=torch.uint8, device=x_TD.device)
    _nvfp4[(num_rows, cdiv(size, _COLUMNS))](
        x_TD, scale_1, codes_TB, scales_TG, x_TD.stride(0), size, GROUP=FP4_GROUP,
        BLOCK=_COLUMNS, num_warps=4, **launch_options(x_TD),
    )  # fmt: skip
    return codes_TB, scales_TG.view(torch.float8_e4m3fn)
