"""Gated activations as one launch.

Legend: T tokens, F features; 2F is the gate's features, then the up projection's.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.activation.reference import silu_mul
from penstock.kernels.op import arch
from penstock.kernels.pdl import launch_options, let_next_start, wait_for_previous

_BLOCK = 1024


@triton.jit
def _silu_mul(x_ptr, out_ptr, stride_t, F, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out[t, c] = silu(x[t, c]) * x[t, F + c]; one program per (token, block of columns)."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < F
    gate = tl.load(x_ptr + token * stride_t + cols, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + token * stride_t + F + cols, mask=inside, other=0.0).to(tl.float32)
    out = (gate / (1.0 + tl.exp(-gate)) * up).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * F + cols, out, mask=inside)


@silu_mul.impl("triton", needs=arch(80), fits=lambda x_T2F: x_T2F.dim() == 2)
def silu_mul_triton(x_T2F: Tensor) -> Tensor:
    assert x_T2F.stride(1) == 1, x_T2F.stride()
    num_tokens, size = x_T2F.shape[0], x_T2F.shape[1] // 2
    out_TF = torch.empty((num_tokens, size), dtype=x_T2F.dtype, device=x_T2F.device)
    if num_tokens:
        grid = (num_tokens, triton.cdiv(size, _BLOCK))
        options = launch_options(x_T2F)
        _silu_mul[grid](x_T2F, out_TF, x_T2F.stride(0), size, BLOCK=_BLOCK, num_warps=4, **options)
    return out_TF
