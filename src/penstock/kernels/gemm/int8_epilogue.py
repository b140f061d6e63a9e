"""Epilogue of the INT8 GEMMs: the INT32 accumulator times its scales, plus the bias; and the
split-K reduction before it.

Accumulators are INT32, so the result does not depend on the number of splits.

Legend: T tokens, O outputs, N splits of the inputs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.launch import jit
from penstock.kernels.pdl import launch_options, let_next_start, wait_for_previous
from penstock.kernels.sizes import cdiv, next_power_of_2

_BLOCK = 512  # outputs of a program


@triton.jit
def load_scale_and_bias(
    w_scale_ptr, bias_ptr, outputs, is_output, stride_w_scale, HAS_BIAS: tl.constexpr
):  # fmt: skip
    """(scales of weights, biases)"""
    w_scale = tl.load(w_scale_ptr + outputs * stride_w_scale, mask=is_output, other=0.0)
    bias = tl.zeros_like(w_scale)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + outputs, mask=is_output, other=0.0).to(tl.float32)
    return w_scale, bias


@triton.jit
def epilogue(y, scale, w_scale, bias, HAS_BIAS: tl.constexpr):
    y = y.to(tl.float32) * scale * w_scale
    if HAS_BIAS:
        y += bias
    return y


@jit
def _reduce_split_k(
    parts_ptr, scale_ptr, w_scale_ptr, bias_ptr, out_ptr, part_size, out_features,
    stride_scale, stride_w_scale,
    N: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[t] = scale[t] * w_scale * sum of parts[:, t], plus bias."""
    let_next_start(PDL)
    token = tl.program_id(0).to(tl.int64)
    outputs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_output = outputs < out_features
    w_scale, bias = load_scale_and_bias(
        w_scale_ptr, bias_ptr, outputs, is_output, stride_w_scale, HAS_BIAS
    )  # fmt: skip
    wait_for_previous(PDL)
    scale = tl.load(scale_ptr + token * stride_scale)
    at = token * out_features + outputs
    y = tl.zeros((BLOCK,), tl.int32)
    for _ in tl.static_range(N):
        y += tl.load(parts_ptr + at, mask=is_output, other=0)
        parts_ptr += part_size
    y = epilogue(y, scale, w_scale, bias, HAS_BIAS)
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=is_output)


def by_row(scale: Tensor) -> int:
    """From a row's scale to the next one's."""
    return int(scale.numel() > 1)


def reduce_split_k(
    parts_NTO: Tensor,
    scale: Tensor,
    weight_scale: Tensor,
    bias_O: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    num_parts, num_tokens, out_features = parts_NTO.shape
    out_TO = torch.empty((num_tokens, out_features), dtype=dtype, device=parts_NTO.device)
    block = min(_BLOCK, next_power_of_2(out_features))
    _reduce_split_k[(num_tokens, cdiv(out_features, block))](
        parts_NTO, scale, weight_scale, bias_O, out_TO, parts_NTO.stride(0), out_features,
        by_row(scale), by_row(weight_scale),
        N=num_parts, HAS_BIAS=bias_O is not None, BLOCK=block, num_warps=4,
        **launch_options(parts_NTO),
    )  # fmt: skip
    return out_TO
