"""Gated activations as one launch.

Legend: T tokens, F features; 2F is the gate's features, then the up projection's; H heads, D head
size.
"""

import torch
import triton.language as tl

from penstock.kernels.activation.reference import gelu_mul, sigmoid_mul, silu_mul
from penstock.kernels.carveout import between_gemms, set_carveout
from penstock.kernels.launch import jit
from penstock.kernels.op import arch
from penstock.kernels.pdl import launch_options, let_next_start, wait_for_previous
from penstock.kernels.sizes import cdiv
from penstock.kernels.triton_math import gelu, sigmoid, silu

_BLOCK = 1024


@jit
def _silu_mul(
    x_ptr, out_ptr, stride_t, F, BLOCK: tl.constexpr, PDL: tl.constexpr,
    IS_GELU: tl.constexpr = False,
):  # fmt: skip
    """out[t, c] = silu(x[t, c]) * x[t, F + c]; one program per (token, block of columns).

    IS_GELU: gelu in the place of silu.
    """
    let_next_start(PDL)
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < F
    gate = tl.load(x_ptr + token * stride_t + cols, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + token * stride_t + F + cols, mask=inside, other=0.0).to(tl.float32)
    gate = gelu(gate) if IS_GELU else silu(gate)
    out = (gate * up).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * F + cols, out, mask=inside)


@silu_mul.impl("triton", needs=arch(80), fits=lambda x_T2F: x_T2F.dim() == 2)
def silu_mul_triton(x_T2F):
    return _gated(x_T2F, is_gelu=False)


@gelu_mul.impl("triton", needs=arch(80), fits=lambda x_T2F: x_T2F.dim() == 2)
def gelu_mul_triton(x_T2F):
    return _gated(x_T2F, is_gelu=True)


def _gated(x_T2F, is_gelu):
    assert x_T2F.stride(1) == 1, x_T2F.stride()
    num_tokens, size = x_T2F.shape[0], x_T2F.shape[1] // 2
    out_TF = torch.empty((num_tokens, size), dtype=x_T2F.dtype, device=x_T2F.device)
    if num_tokens:
        grid = (num_tokens, cdiv(size, _BLOCK))
        options = launch_options(x_T2F)
        kernel = _silu_mul[grid](
            x_T2F, out_TF, x_T2F.stride(0), size, BLOCK=_BLOCK, IS_GELU=is_gelu, num_warps=4,
            **options,
        )  # fmt: skip
        set_carveout(kernel, between_gemms(num_tokens))
    return out_TF


@jit
def _sigmoid_mul(
    x_ptr, gate_ptr, out_ptr, num_values, stride_t, stride_h,
    H: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out = x * sigmoid(gate), x and out without gaps; one program per BLOCK values of them."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_values
    gate_at = at // (H * D) * stride_t + at // D % H * stride_h + at % D
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + gate_at, mask=inside, other=0.0).to(tl.float32)
    out = (x * sigmoid(gate)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, out, mask=inside)


@sigmoid_mul.impl("triton", needs=arch(80))
def sigmoid_mul_triton(x_THD, gate_THD):
    assert gate_THD.stride(2) == 1 and gate_THD.shape == x_THD.shape, gate_THD.stride()
    x_THD = x_THD.contiguous()
    out_THD = torch.empty_like(x_THD)
    if num_values := x_THD.numel():
        _, num_heads, size = x_THD.shape
        _sigmoid_mul[(cdiv(num_values, _BLOCK),)](
            x_THD, gate_THD, out_THD, num_values, gate_THD.stride(0), gate_THD.stride(1),
            H=num_heads, D=size, BLOCK=_BLOCK, num_warps=4, **launch_options(x_THD),
        )  # fmt: skip
    return out_THD
