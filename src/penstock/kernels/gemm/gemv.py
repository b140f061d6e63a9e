"""GEMV: one or two tokens times a large matrix. Memory-bound: the time is that of reading it once.

Many small programs, each with a few rows of the matrix, keep the memory busy to the end. Their
first weights are in flight before the previous kernel has finished (PDL); that hides a small kernel
better than fusing it as a prologue, which every program would have to repeat (with the norms fused
into the GEMVs a step of Llama-8B took 4.31 instead of 3.93 ms on an H200).

Legend: T tokens, I inputs, O outputs, F features.
"""

import functools
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels import tuned
from penstock.kernels.gemm.dense import dense_linear
from penstock.kernels.gemm.gated import (
    MAX_GEMV_TOKENS,
    MAX_TOKENS,
    MIN_SMALL_M_TOKENS,
    gated_linear,
)
from penstock.kernels.gemm.small_m import is_faster_than_cublas, scale_strides, small_m_gemm
from penstock.kernels.launch import jit
from penstock.kernels.op import arch
from penstock.kernels.pdl import launch_options, let_next_start, wait_for_previous
from penstock.kernels.quantize.reference import BLOCK as FP8_BLOCK
from penstock.kernels.sizes import cdiv, next_power_of_2
from penstock.kernels.triton_dtypes import TRITON_DTYPES
from penstock.kernels.triton_math import fp8_clamp, silu


@dataclass(frozen=True, slots=True)
class GemvConfig:
    """Launch config."""

    rows: int  # outputs of a program
    block: int  # inputs read at once
    num_warps: int


@functools.cache
def gemv_config(
    out_features: int, in_features: int, element_bytes: int, num_tokens: int
) -> GemvConfig:
    """Where nothing was tuned, what is good on an H200 for Llama-8B, Llama-70B and one token.

    bf16, us (roofline): 6144 x 4096 12.6 (11.1), 4096 x 4096 8.6 (7.4), 28672 x 4096 53.3 (52.0),
    4096 x 14336 27.9 (26.0), 8192 x 28672 103 (104; with two long rows 124); fp8: 7.3 (5.6), 5.3
    (3.7), 28.3 (26.0), 15.4 (13.0), 53.8 (52.0; 59.1).
    """
    if element_bytes == 1 and in_features < 8192:
        usual = GemvConfig(rows=2, block=4096, num_warps=4)
    elif element_bytes == 1:
        usual = GemvConfig(rows=1, block=1024, num_warps=4)
    elif in_features < 16384:
        usual = GemvConfig(rows=2, block=2048, num_warps=8 if in_features <= 8192 else 4)
    else:
        usual = GemvConfig(rows=1, block=1024, num_warps=8)
    small = usual.block // 2
    if cdiv(in_features, usual.block) * 2 > cdiv(in_features, small):
        usual = replace(usual, block=small, num_warps=4)  # half of the last one would be empty
    return tuned.best(
        "gemv",
        usual,
        outputs=out_features,
        inputs=in_features,
        bits=8 * element_bytes,
        tokens=next_power_of_2(num_tokens),
    )


@triton.jit
def _load_weights(w_rows, inputs, in_band, in_features):
    mask = in_band & (inputs < in_features)
    return tl.load(w_rows + inputs, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def _partials(
    w, x, tile, tokens, outputs, x_scale_ptr, w_scale_ptr, in_features,
    stride_x_scale, stride_x_group, stride_w_scale,
    T: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, IN_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Partial results to accumulate: w x; with block scales the scaled sum of each GROUP."""
    y = w.to(tl.float32) * x.to(tl.float32)
    if IN_BLOCKS:
        y = tl.sum(tl.reshape(y, (y.shape[0], y.shape[1], BLOCK // GROUP, GROUP)), axis=3)
        groups = (tile * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP))[None, None, :]
        inside = groups * GROUP < in_features
        at = tokens * stride_x_scale + groups * stride_x_group
        y *= tl.load(x_scale_ptr + at, mask=inside & (tokens < T), other=0.0)
        at = (outputs // GROUP * stride_w_scale)[None, :, None] + groups
        y *= tl.load(w_scale_ptr + at, mask=inside, other=0.0)
    return y


@triton.jit
def _epilogue(
    y, outputs, is_output, tokens, x_scale_ptr, w_scale_ptr, bias_ptr,
    stride_x_scale, stride_w_scale, T: tl.constexpr,
    HAS_SCALES: tl.constexpr, IN_BLOCKS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Scales and bias; block scales are in `y` already."""
    if HAS_SCALES and not IN_BLOCKS:
        y *= tl.load(x_scale_ptr + tokens * stride_x_scale, mask=tokens < T, other=0.0)
        y *= tl.load(w_scale_ptr + outputs * stride_w_scale, mask=is_output, other=0.0)
    if HAS_BIAS:
        y += tl.load(bias_ptr + outputs, mask=is_output, other=0.0).to(tl.float32)
    return y


@jit(do_not_specialize=["out_features"])
def _gemv(
    x_ptr, w_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, out_ptr, out_scale_ptr,
    out_features, in_features, stride_x, stride_w, stride_x_scale, stride_x_group, stride_w_scale,
    T: tl.constexpr, BLOCK_T: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    TILES: tl.constexpr, HAS_SCALES: tl.constexpr, IN_BLOCKS: tl.constexpr, GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr, IS_GATED: tl.constexpr, GEMM_DTYPE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[t, o] = sum over i of x[t, i] * w[o, i] of ROWS outputs, in fp32 without tensor cores.

    IS_GATED: silu(out[t, o]) * out[t, out_features + o], both rounded to GEMM_DTYPE before.
    IN_BLOCKS: GROUP inputs of a token share a scale, and GROUP x GROUP weights.
    """
    outputs = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tokens = tl.arange(0, BLOCK_T)[:, None, None]
    inputs = tl.arange(0, BLOCK)[None, None, :]
    in_band = (outputs < out_features)[None, :, None]
    w_rows = w_ptr + (outputs.to(tl.int64) * stride_w)[None, :, None]
    up_rows = w_rows + out_features.to(tl.int64) * stride_w
    let_next_start(PDL)
    w = _load_weights(w_rows, inputs, in_band, in_features)
    if IS_GATED:
        up = _load_weights(up_rows, inputs, in_band, in_features)
    wait_for_previous(PDL)
    x_rows = x_ptr + tokens * stride_x
    x = tl.load(x_rows + inputs, mask=(tokens < T) & (inputs < in_features), other=0.0)
    acc = _partials(
        w, x, 0, tokens, outputs, x_scale_ptr, w_scale_ptr, in_features,
        stride_x_scale, stride_x_group, stride_w_scale, T, BLOCK, GROUP, IN_BLOCKS,
    )  # fmt: skip
    if IS_GATED:
        up_acc = _partials(
            up, x, 0, tokens, out_features + outputs, x_scale_ptr, w_scale_ptr, in_features,
            stride_x_scale, stride_x_group, stride_w_scale, T, BLOCK, GROUP, IN_BLOCKS,
        )  # fmt: skip
    for tile in tl.static_range(1, TILES):
        at = tile * BLOCK + inputs
        w = _load_weights(w_rows, at, in_band, in_features)
        x = tl.load(x_rows + at, mask=(tokens < T) & (at < in_features), other=0.0)
        acc += _partials(
            w, x, tile, tokens, outputs, x_scale_ptr, w_scale_ptr, in_features,
            stride_x_scale, stride_x_group, stride_w_scale, T, BLOCK, GROUP, IN_BLOCKS,
        )  # fmt: skip
        if IS_GATED:
            up = _load_weights(up_rows, at, in_band, in_features)
            up_acc += _partials(
                up, x, tile, tokens, out_features + outputs, x_scale_ptr, w_scale_ptr, in_features,
                stride_x_scale, stride_x_group, stride_w_scale, T, BLOCK, GROUP, IN_BLOCKS,
            )  # fmt: skip

    tokens = tl.arange(0, BLOCK_T)[:, None]
    outputs = outputs[None, :]
    is_output = outputs < out_features
    y = _epilogue(
        tl.sum(acc, axis=2), outputs, is_output, tokens, x_scale_ptr, w_scale_ptr, bias_ptr,
        stride_x_scale, stride_w_scale, T, HAS_SCALES, IN_BLOCKS, HAS_BIAS,
    )  # fmt: skip
    if IS_GATED:
        up_y = _epilogue(
            tl.sum(up_acc, axis=2), out_features + outputs, is_output, tokens,
            x_scale_ptr, w_scale_ptr, bias_ptr,
            stride_x_scale, stride_w_scale, T, HAS_SCALES, IN_BLOCKS, HAS_BIAS,
        )  # fmt: skip
        y, up_y = y.to(GEMM_DTYPE).to(tl.float32), up_y.to(GEMM_DTYPE).to(tl.float32)
        y = silu(y) * up_y
    if out_ptr.dtype.element_ty.primitive_bitwidth == 8:
        y = fp8_clamp(y / tl.load(out_scale_ptr))
    out_ptr += tokens * out_features + outputs
    tl.store(out_ptr, y.to(out_ptr.dtype.element_ty), mask=(tokens < T) & is_output)


def gemv(
    x_TI: Tensor,
    scale: Tensor | None,
    weight_OI: Tensor,
    weight_scale: Tensor | None,
    bias_O: Tensor | None,
    dtype: torch.dtype,
    out_scale_1: Tensor | None = None,
    *,
    is_gated: bool = False,
    config: GemvConfig | None = None,
) -> Tensor:
    """x W^T + b in `dtype`, or as `gated_linear`."""
    num_tokens, in_features = x_TI.shape
    out_features = weight_OI.shape[0] // (2 if is_gated else 1)
    assert x_TI.stride(1) == weight_OI.stride(1) == 1, (x_TI.stride(), weight_OI.stride())
    c = config or gemv_config(*weight_OI.shape, weight_OI.element_size(), num_tokens)
    out_dtype = dtype if out_scale_1 is None else torch.float8_e4m3fn
    out_TO = torch.empty((num_tokens, out_features), dtype=out_dtype, device=x_TI.device)
    in_blocks = weight_scale is not None and weight_scale.dim() == 2
    strides = scale_strides(scale, weight_scale)
    _gemv[(cdiv(out_features, c.rows),)](
        x_TI, weight_OI, scale, weight_scale, bias_O, out_TO, out_scale_1,
        out_features, in_features, x_TI.stride(0), weight_OI.stride(0), *strides,
        T=num_tokens, BLOCK_T=next_power_of_2(num_tokens), ROWS=c.rows, BLOCK=c.block,
        TILES=cdiv(in_features, c.block), HAS_SCALES=scale is not None,
        IN_BLOCKS=in_blocks, GROUP=FP8_BLOCK, HAS_BIAS=bias_O is not None, IS_GATED=is_gated,
        GEMM_DTYPE=TRITON_DTYPES[dtype], num_warps=c.num_warps, **launch_options(x_TI),
    )  # fmt: skip
    return out_TO


@dense_linear.impl(
    "small_m",
    needs=arch(90),
    fits=lambda x_TI, weight_OI, bias_O=None: (
        x_TI.element_size() == 2 and is_faster_than_cublas(x_TI.shape[0], weight_OI)
    ),
)
def dense_linear_small_m(x_TI, weight_OI, bias_O=None):
    return small_m_gemm(x_TI, None, weight_OI, None, bias_O, x_TI.dtype)


@dense_linear.impl(
    "gemv",
    needs=arch(80),
    fits=lambda x_TI, weight_OI, bias_O=None: 0 < x_TI.shape[0] <= MAX_GEMV_TOKENS,
)
def dense_linear_gemv(x_TI, weight_OI, bias_O=None):
    return gemv(x_TI, None, weight_OI, None, bias_O, x_TI.dtype)


gated_linear.impl(
    "gemv", needs=arch(80), fits=lambda x_TI, *_: 0 < x_TI.shape[0] < MIN_SMALL_M_TOKENS
)(functools.partial(gemv, is_gated=True))
gated_linear.impl("small_m", needs=arch(80), fits=lambda x_TI, *_: 0 < x_TI.shape[0] <= MAX_TOKENS)(
    functools.partial(small_m_gemm, is_gated=True)
)
