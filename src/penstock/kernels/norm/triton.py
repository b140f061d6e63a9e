"""Norms as one launch each. Rows may have gaps (heads of a fused projection), D is contiguous.

Legend: T tokens, N heads of a token (1 for a plain [T, D]), D the normed dimension.
"""

import torch
import triton.language as tl
from torch import Tensor

from penstock.kernels.carveout import between_gemms, set_carveout
from penstock.kernels.launch import jit
from penstock.kernels.norm.reference import add_rms_norm, rms_norm
from penstock.kernels.op import arch
from penstock.kernels.pdl import launch_options, let_next_start, wait_for_previous
from penstock.kernels.sizes import cdiv, next_power_of_2

_MAX_D = 16384  # one program holds a whole row in registers
_TILE = 2048  # elements a program should at least have, so that head norms take many rows at once


@jit(do_not_specialize=["num_rows"])
def _rms_norm(
    x_ptr, weight_ptr, out_ptr, num_rows, stride_t, stride_n, eps,
    N: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out[r] = x[r] * rsqrt(mean(x[r]^2) + eps) * weight; row r is head r % N of token r // N."""
    let_next_start(PDL)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    cols = tl.arange(0, BLOCK_D)[None, :]
    inside = (rows < num_rows) & (cols < D)
    base = (rows // N).to(tl.int64) * stride_t + (rows % N) * stride_n
    weight = tl.load(weight_ptr + cols, mask=cols < D, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    x = tl.load(x_ptr + base + cols, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / D + eps)
    out = (x * scale * weight).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + rows.to(tl.int64) * D + cols, out, mask=inside)


@jit
def _add_rms_norm(
    x_ptr, residual_ptr, weight_ptr, out_ptr, sum_ptr, stride_x, stride_residual, eps,
    D: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """sum = x + residual, rounded to its dtype; out = rms_norm(sum); one program per row."""
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_D)
    inside = cols < D
    weight = tl.load(weight_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    x = tl.load(x_ptr + row * stride_x + cols, mask=inside, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + row * stride_residual + cols, mask=inside, other=0.0)
    total = (x + residual.to(tl.float32)).to(sum_ptr.dtype.element_ty)
    tl.store(sum_ptr + row * D + cols, total, mask=inside)
    total = total.to(tl.float32)
    out = total * tl.rsqrt(tl.sum(total * total, axis=0) / D + eps) * weight
    tl.store(out_ptr + row * D + cols, out.to(out_ptr.dtype.element_ty), mask=inside)


def _num_warps(num_elements: int) -> int:
    """16 elements (two 16-byte accesses of a 2-byte dtype) per thread, one to 16 warps."""
    return max(1, min(16, num_elements // (32 * 16)))


def _fits(x_TD: Tensor) -> bool:
    return x_TD.dim() in (2, 3) and x_TD.shape[-1] <= _MAX_D


@rms_norm.impl("triton", needs=arch(80), fits=lambda x_TD, weight_D, eps: _fits(x_TD))
def rms_norm_triton(x_TD, weight_D, eps):
    if x_TD.stride(-1) != 1:
        x_TD = x_TD.contiguous()
    out_TD = torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device)
    size = x_TD.shape[-1]
    num_heads, stride_n = (x_TD.shape[1], x_TD.stride(1)) if x_TD.dim() == 3 else (1, 0)
    num_rows = x_TD.shape[0] * num_heads
    if num_rows == 0:
        return out_TD
    block = next_power_of_2(size)
    rows = max(1, _TILE // block) if num_rows > 64 else 1
    kernel = _rms_norm[(cdiv(num_rows, rows),)](
        x_TD, weight_D, out_TD, num_rows, x_TD.stride(0), stride_n, eps,
        N=num_heads, D=size, BLOCK_D=block, ROWS=rows, num_warps=_num_warps(block * rows),
        **launch_options(x_TD),
    )  # fmt: skip
    set_carveout(kernel, between_gemms(x_TD.shape[0]))
    return out_TD


@add_rms_norm.impl(
    "triton",
    needs=arch(80),
    fits=lambda x_TD, residual_TD, weight_D, eps: x_TD.dim() == 2 and _fits(x_TD),
)
def add_rms_norm_triton(x_TD, residual_TD, weight_D, eps):
    assert x_TD.stride(1) == 1 and residual_TD.stride(1) == 1, (x_TD.stride(), residual_TD.stride())
    num_rows, size = x_TD.shape
    out_TD = torch.empty((num_rows, size), dtype=x_TD.dtype, device=x_TD.device)
    sum_TD = torch.empty_like(out_TD)
    if num_rows:
        block = next_power_of_2(size)
        kernel = _add_rms_norm[(num_rows,)](
            x_TD, residual_TD, weight_D, out_TD, sum_TD, x_TD.stride(0), residual_TD.stride(0), eps,
            D=size, BLOCK_D=block, num_warps=_num_warps(block), **launch_options(x_TD),
        )  # fmt: skip
        set_carveout(kernel, between_gemms(num_rows))
    return out_TD, sum_TD
