"""FP8 quantization of activations on a GPU, one launch each: alone, or fused with the previous op.

Legend: T tokens, D channels, F features, G groups.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.carveout import between_gemms, set_carveout
from penstock.kernels.launch import jit
from penstock.kernels.op import arch
from penstock.kernels.pdl import launch_options, let_next_start, wait_for_previous
from penstock.kernels.quantize.reference import quantize_fp8, rms_norm_fp8, silu_mul_fp8
from penstock.kernels.sizes import cdiv, next_power_of_2
from penstock.kernels.triton_math import fp8_scale, silu, to_fp8

_FP8 = torch.float8_e4m3fn
_MAX_D = 16384  # of a norm: one program holds a whole row in registers
_COLUMNS = 1024  # of one program where columns do not depend on each other
_ROW_COLUMNS = 4096  # of one pass where a program goes over its row


@triton.jit
def quantize_groups(
    x, scales_ptr, num_rows, row, first, num_groups, N: tl.constexpr, G: tl.constexpr
):
    """N groups of G values: their scales stored behind `first`, and the values rounded."""
    x = tl.reshape(x, (N, G))
    scale = fp8_scale(tl.max(tl.abs(x), axis=1))
    groups = first + tl.arange(0, N)
    tl.store(scales_ptr + groups.to(tl.int64) * num_rows + row, scale, mask=groups < num_groups)
    return tl.reshape(to_fp8(x, scale[:, None]), (N * G,))


@triton.jit
def _load(x_ptr, cols, inside, SIZE, GATED: tl.constexpr):
    """x, or silu(gate) * up where x is both, in fp32."""
    x = tl.load(x_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(x_ptr + SIZE + cols, mask=inside, other=0.0).to(tl.float32)
        x = silu(x) * up
    return x


@jit(do_not_specialize=["num_rows"])
def _quantize(
    x_ptr, out_ptr, scales_ptr, num_rows, stride_t, SIZE,
    GATED: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per (row, block of columns). GROUP 0: by the one scale there is; else each GROUP
    columns get a scale."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < SIZE
    x = _load(x_ptr + row * stride_t, cols, inside, SIZE, GATED)
    if GROUP == 0:
        out = to_fp8(x, tl.load(scales_ptr))
    else:
        first = tl.program_id(1) * (BLOCK // GROUP)
        out = quantize_groups(
            x, scales_ptr, num_rows, row, first, SIZE // GROUP, BLOCK // GROUP, GROUP
        )
    tl.store(out_ptr + row * SIZE + cols, out, mask=inside)


@jit
def _quantize_rows(
    x_ptr, out_ptr, scales_ptr, stride_t, SIZE,
    GATED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """scale = max(|row|) / 448. One program goes over its row twice; the second time it is near."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride_t
    largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, SIZE, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, tl.abs(_load(x_ptr, cols, cols < SIZE, SIZE, GATED)))
    scale = fp8_scale(tl.max(largest, axis=0))
    tl.store(scales_ptr + row, scale)
    for start in range(0, SIZE, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = _load(x_ptr, cols, cols < SIZE, SIZE, GATED)
        tl.store(out_ptr + row * SIZE + cols, to_fp8(x, scale), mask=cols < SIZE)


@jit(do_not_specialize=["num_rows"])
def _rms_norm(
    x_ptr, residual_ptr, weight_ptr, out_ptr, scales_ptr, sum_ptr, num_rows,
    stride_x, stride_residual, eps,
    HAS_RESIDUAL: tl.constexpr, IS_STATIC: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """sum = x + residual, rounded to its dtype; out = rms_norm(sum), quantized; one per row."""
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < D
    weight = tl.load(weight_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    if IS_STATIC:
        scale = tl.load(scales_ptr)
    wait_for_previous(PDL)
    total = tl.load(x_ptr + row * stride_x + cols, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row * stride_residual + cols, mask=inside, other=0.0)
        rounded = (total + residual.to(tl.float32)).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * D + cols, rounded, mask=inside)
        total = rounded.to(tl.float32)
    normed = total * tl.rsqrt(tl.sum(total * total, axis=0) / D + eps) * weight
    if IS_STATIC:
        out = to_fp8(normed, scale)
    elif GROUP == 0:
        scale = fp8_scale(tl.max(tl.abs(normed), axis=0))
        tl.store(scales_ptr + row, scale)
        out = to_fp8(normed, scale)
    else:
        out = quantize_groups(
            normed, scales_ptr, num_rows, row, 0, D // GROUP, BLOCK // GROUP, GROUP
        )
    tl.store(out_ptr + row * D + cols, out, mask=inside)


def _scales(x: Tensor, scale_1: Tensor | None, group: int, size: int) -> Tensor:
    """Where the scales go: nothing is written to a given one."""
    if scale_1 is not None:
        return scale_1
    assert group == 0 or size % group == 0, (size, group)
    shape = (size // group if group else 1, x.shape[0])
    return torch.empty(shape, dtype=torch.float32, device=x.device).t()


def _num_warps(num_elements: int) -> int:
    """16 elements per thread, one to 16 warps."""
    return max(1, min(16, num_elements // (32 * 16)))


def _quantized(
    x: Tensor, scale_1: Tensor | None, group: int, size: int, gated: bool
) -> tuple[Tensor, Tensor]:
    assert x.stride(1) == 1, x.stride()
    num_rows = x.shape[0]
    out = torch.empty((num_rows, size), dtype=_FP8, device=x.device)
    scales = _scales(x, scale_1, group, size)
    if num_rows == 0:
        return out, scales
    if scale_1 is None and group == 0:
        block = min(next_power_of_2(size), _ROW_COLUMNS)
        kernel = _quantize_rows[(num_rows,)](
            x, out, scales, x.stride(0), size,
            GATED=gated, BLOCK=block, num_warps=_num_warps(block), **launch_options(x),
        )  # fmt: skip
    else:
        kernel = _quantize[(num_rows, cdiv(size, _COLUMNS))](
            x, out, scales, num_rows, x.stride(0), size,
            GATED=gated, GROUP=0 if scale_1 is not None else group, BLOCK=_COLUMNS, num_warps=4,
            **launch_options(x),
        )  # fmt: skip
    set_carveout(kernel, between_gemms(num_rows))
    return out, scales


def _fits_groups(group: int) -> bool:
    return group in (0, 32, 64, 128)


@quantize_fp8.impl(
    "triton",
    needs=arch(89),
    fits=lambda x_TD, scale_1, group: x_TD.dim() == 2 and _fits_groups(group),
)
def quantize_fp8_triton(x_TD, scale_1, group):
    return _quantized(x_TD, scale_1, group, x_TD.shape[1], gated=False)


@silu_mul_fp8.impl(
    "triton",
    needs=arch(89),
    fits=lambda x_T2F, scale_1, group: x_T2F.dim() == 2 and _fits_groups(group),
)
def silu_mul_fp8_triton(x_T2F, scale_1, group):
    return _quantized(x_T2F, scale_1, group, x_T2F.shape[1] // 2, gated=True)


@rms_norm_fp8.impl(
    "triton",
    needs=arch(89),
    fits=lambda x_TD, residual_TD, weight_D, eps, scale_1, group: (
        x_TD.dim() == 2 and x_TD.shape[1] <= _MAX_D and _fits_groups(group)
    ),
)
def rms_norm_fp8_triton(x_TD, residual_TD, weight_D, eps, scale_1, group):
    assert x_TD.stride(1) == 1 and (residual_TD is None or residual_TD.stride(1) == 1)
    num_rows, size = x_TD.shape
    out_TD = torch.empty((num_rows, size), dtype=_FP8, device=x_TD.device)
    scales = _scales(x_TD, scale_1, group, size)
    sum_TD = x_TD
    if residual_TD is not None:
        sum_TD = torch.empty_like(x_TD, memory_format=torch.contiguous_format)
    if num_rows:
        block = max(next_power_of_2(size), group)
        kernel = _rms_norm[(num_rows,)](
            x_TD, residual_TD, weight_D, out_TD, scales, sum_TD, num_rows,
            x_TD.stride(0), 0 if residual_TD is None else residual_TD.stride(0), eps,
            HAS_RESIDUAL=residual_TD is not None, IS_STATIC=scale_1 is not None, GROUP=group,
            D=size, BLOCK=block, num_warps=_num_warps(block), **launch_options(x_TD),
        )  # fmt: skip
        set_carveout(kernel, between_gemms(num_rows))
    return out_TD, scales, sum_TD
