"""Sums of whole numbers times what these stand for; parts of sums added up before.

Sums are int32, so it makes no difference in how many parts they came.

Legend: T tokens, O outputs, N parts of the inputs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.pdl import launch_options, let_next_start, wait_for_previous

_BLOCK = 512  # outputs of a program


@triton.jit
def of_outputs(
    w_scale_ptr, bias_ptr, outputs, is_output, stride_w_scale, HAS_BIAS: tl.constexpr
):  # fmt: skip
    """(scales of weights, biases)"""
    w_scale = tl.load(w_scale_ptr + outputs * stride_w_scale, mask=is_output, other=0.0)
    bias = tl.zeros_like(w_scale)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + outputs, mask=is_output, other=0.0).to(tl.float32)
    return w_scale, bias


@triton.jit
def finished(y, scale, w_scale, bias, HAS_BIAS: tl.constexpr):
    y = y.to(tl.float32) * scale * w_scale
    if HAS_BIAS:
        y += bias
    return y


@triton.jit
def _add_up(
    parts_ptr, scale_ptr, w_scale_ptr, bias_ptr, out_ptr, part_size, num_outputs,
    stride_scale, stride_w_scale,
    N: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[t] = scale[t] * w_scale * sum of parts[:, t], plus bias."""
    let_next_start(PDL)
    token = tl.program_id(0).to(tl.int64)
    outputs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_output = outputs < num_outputs
    w_scale, bias = of_outputs(
        w_scale_ptr, bias_ptr, outputs, is_output, stride_w_scale, HAS_BIAS
    )  # fmt: skip
    wait_for_previous(PDL)
    scale = tl.load(scale_ptr + token * stride_scale)
    at = token * num_outputs + outputs
    y = tl.zeros((BLOCK,), tl.int32)
    for _ in tl.static_range(N):
        y += tl.load(parts_ptr + at, mask=is_output, other=0)
        parts_ptr += part_size
    y = finished(y, scale, w_scale, bias, HAS_BIAS)
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=is_output)


def by_row(scale: Tensor) -> int:
    """From a row's scale to the next one's."""
    return int(scale.numel() > 1)


def add_up(
    parts_NTO: Tensor,
    scale: Tensor,
    weight_scale: Tensor,
    bias_O: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    num_parts, num_tokens, num_outputs = parts_NTO.shape
    out_TO = torch.empty((num_tokens, num_outputs), dtype=dtype, device=parts_NTO.device)
    block = min(_BLOCK, triton.next_power_of_2(num_outputs))
    _add_up[(num_tokens, triton.cdiv(num_outputs, block))](
        parts_NTO, scale, weight_scale, bias_O, out_TO, parts_NTO.stride(0), num_outputs,
        by_row(scale), by_row(weight_scale),
        N=num_parts, HAS_BIAS=bias_O is not None, BLOCK=block, num_warps=4,
        **launch_options(parts_NTO),
    )  # fmt: skip
    return out_TO
