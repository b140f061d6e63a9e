"""Prologue (gates) and epilogue (gated norm) of the gated delta rule, one launch each.

Legend: T tokens, H key heads, V value heads, R = V / H, D value size, E = R * D.
"""

import torch
import triton.language as tl

from penstock.kernels.launch import jit
from penstock.kernels.op import arch
from penstock.kernels.pdl import launch_options, let_next_start, wait_for_previous
from penstock.kernels.recurrent.reference import delta_gates, rms_norm_gated
from penstock.kernels.sizes import cdiv, next_power_of_2
from penstock.kernels.triton_math import sigmoid, silu

_BLOCK = 256
_TILE = 2048  # elements of a program of the norm


@jit(do_not_specialize=["num_elements"])
def _delta_gates(
    ba_ptr, rate_log_ptr, bias_ptr, g_ptr, beta_ptr, num_elements, stride_t,
    V: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """g = -exp(rate_log) * softplus(a + bias), beta = sigmoid(b); one program per block of (t, v).

    A key head's columns are b of its R value heads, then a of the same.
    """
    let_next_start(PDL)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_elements
    token, head = at // V, at % V
    rate = tl.exp(tl.load(rate_log_ptr + head).to(tl.float32))
    bias = tl.load(bias_ptr + head).to(tl.float32)
    wait_for_previous(PDL)
    b_ptr = ba_ptr + token.to(tl.int64) * stride_t + (head // R) * (2 * R) + head % R
    b = tl.load(b_ptr, mask=inside, other=0.0).to(tl.float32)
    a = tl.load(b_ptr + R, mask=inside, other=0.0).to(tl.float32) + bias
    softplus = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(a)))
    tl.store(g_ptr + at, -rate * softplus, mask=inside)
    tl.store(beta_ptr + at, sigmoid(b), mask=inside)


@jit(do_not_specialize=["num_rows"])
def _rms_norm_gated(
    x_ptr, z_ptr, weight_ptr, out_ptr, num_rows, stride_zt, stride_zh, eps,
    V: tl.constexpr, R: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out[r] = rms_norm(x[r]) * silu(z[r]); row r is value head r % V of token r // V."""
    let_next_start(PDL)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    cols = tl.arange(0, BLOCK_D)[None, :]
    inside = (rows < num_rows) & (cols < D)
    weight = tl.load(weight_ptr + cols, mask=cols < D, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    at = rows.to(tl.int64) * D + cols
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    head = rows % V
    z_at = (rows // V).to(tl.int64) * stride_zt + (head // R) * stride_zh + (head % R) * D + cols
    z = tl.load(z_ptr + z_at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / D + eps)
    out = x * scale * weight * silu(z)
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside)


@delta_gates.impl("triton", needs=arch(80))
def delta_gates_triton(ba_THG, rate_log_V, bias_V):
    (num_tokens, _, width), num_heads = ba_THG.shape, rate_log_V.shape[0]
    assert ba_THG.stride()[1:] == (width, 1), ba_THG.stride()
    both = torch.empty((2, num_tokens, num_heads), dtype=torch.float32, device=ba_THG.device)
    g_TV, beta_TV = both.unbind()
    if num_elements := g_TV.numel():
        _delta_gates[(cdiv(num_elements, _BLOCK),)](
            ba_THG, rate_log_V, bias_V, g_TV, beta_TV, num_elements, ba_THG.stride(0),
            V=num_heads, R=width // 2, BLOCK=_BLOCK, num_warps=2, **launch_options(ba_THG),
        )  # fmt: skip
    return g_TV, beta_TV


@rms_norm_gated.impl("triton", needs=arch(80))
def rms_norm_gated_triton(x_TVD, z_THE, weight_D, eps):
    assert x_TVD.is_contiguous() and z_THE.stride(2) == 1, (x_TVD.stride(), z_THE.stride())
    num_tokens, num_heads, size = x_TVD.shape
    out_TVD = torch.empty_like(x_TVD)
    if num_rows := num_tokens * num_heads:
        block = next_power_of_2(size)
        rows = max(1, _TILE // block)
        _rms_norm_gated[(cdiv(num_rows, rows),)](
            x_TVD, z_THE, weight_D, out_TVD, num_rows, z_THE.stride(0), z_THE.stride(1), eps,
            V=num_heads, R=num_heads // z_THE.shape[1], D=size, BLOCK_D=block, ROWS=rows,
            num_warps=4, **launch_options(x_TVD),
        )  # fmt: skip
    return out_TVD
