"""A token or a few times a large matrix: the time is that of reading the matrix once.

Many small programs, each with a few rows of the matrix, keep the memory busy to the end. Their
first weights are on the way before the kernel in front of them has finished; that hides a small
kernel better than taking its work in here, which every program would have to do (with the norms in
front of their products a step of Llama-8B took 4.31 instead of 3.93 ms on an H200).

Legend: T tokens, I inputs, O outputs, F features.
"""

import functools
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels import tuned
from penstock.kernels.fp8 import reference as fp8
from penstock.kernels.gemm.dense import dense_linear
from penstock.kernels.gemm.few import (
    MAX_GEMV_TOKENS,
    MAX_TOKENS,
    MIN_TILES_TOKENS,
    gated_linear,
)
from penstock.kernels.gemm.tiles import is_quicker, scale_strides, tiles
from penstock.kernels.op import arch
from penstock.kernels.pdl import launch_options, let_next_start, wait_for_previous
from penstock.kernels.triton_dtypes import TRITON_DTYPES


@dataclass(frozen=True, slots=True)
class GemvConfig:
    """Launch shape."""

    rows: int  # outputs of a program
    block: int  # inputs read at once
    num_warps: int


@functools.cache
def gemv_config(
    num_outputs: int, num_inputs: int, element_bytes: int, num_tokens: int
) -> GemvConfig:
    """Where nothing was measured, what is good on an H200 for Llama-8B, Llama-70B and one token.

    bf16, us (floor): 6144 x 4096 12.6 (11.1), 4096 x 4096 8.6 (7.4), 28672 x 4096 53.3 (52.0),
    4096 x 14336 27.9 (26.0), 8192 x 28672 103 (104; with two long rows 124); fp8: 7.3 (5.6), 5.3
    (3.7), 28.3 (26.0), 15.4 (13.0), 53.8 (52.0; 59.1).
    """
    if element_bytes == 1 and num_inputs < 8192:
        usual = GemvConfig(rows=2, block=4096, num_warps=4)
    elif element_bytes == 1:
        usual = GemvConfig(rows=1, block=1024, num_warps=4)
    elif num_inputs < 16384:
        usual = GemvConfig(rows=2, block=2048, num_warps=8 if num_inputs <= 8192 else 4)
    else:
        usual = GemvConfig(rows=1, block=1024, num_warps=8)
    small = usual.block // 2
    if triton.cdiv(num_inputs, usual.block) * 2 > triton.cdiv(num_inputs, small):
        usual = replace(usual, block=small, num_warps=4)  # half of the last one would be empty
    return tuned.best(
        "gemv",
        usual,
        outputs=num_outputs,
        inputs=num_inputs,
        bits=8 * element_bytes,
        tokens=triton.next_power_of_2(num_tokens),
    )


@triton.jit
def _load_weights(w_rows, inputs, in_band, num_inputs):
    mask = in_band & (inputs < num_inputs)
    return tl.load(w_rows + inputs, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def _products(
    w, x, tile, tokens, outputs, x_scale_ptr, w_scale_ptr, num_inputs,
    stride_x_scale, stride_x_group, stride_w_scale,
    T: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, IN_BLOCKS: tl.constexpr,
):  # fmt: skip
    """What is to be added up: w x, where scales are of blocks the scaled sum of each GROUP."""
    y = w.to(tl.float32) * x.to(tl.float32)
    if IN_BLOCKS:
        y = tl.sum(tl.reshape(y, (y.shape[0], y.shape[1], BLOCK // GROUP, GROUP)), axis=3)
        groups = (tile * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP))[None, None, :]
        inside = groups * GROUP < num_inputs
        at = tokens * stride_x_scale + groups * stride_x_group
        y *= tl.load(x_scale_ptr + at, mask=inside & (tokens < T), other=0.0)
        at = (outputs // GROUP * stride_w_scale)[None, :, None] + groups
        y *= tl.load(w_scale_ptr + at, mask=inside, other=0.0)
    return y


@triton.jit
def _finished(
    y, outputs, is_output, tokens, x_scale_ptr, w_scale_ptr, bias_ptr,
    stride_x_scale, stride_w_scale, T: tl.constexpr,
    HAS_SCALES: tl.constexpr, IN_BLOCKS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Scales and bias of a product; those of blocks are in it already."""
    if HAS_SCALES and not IN_BLOCKS:
        y *= tl.load(x_scale_ptr + tokens * stride_x_scale, mask=tokens < T, other=0.0)
        y *= tl.load(w_scale_ptr + outputs * stride_w_scale, mask=is_output, other=0.0)
    if HAS_BIAS:
        y += tl.load(bias_ptr + outputs, mask=is_output, other=0.0).to(tl.float32)
    return y


@triton.jit(do_not_specialize=["num_outputs"])
def _gemv(
    x_ptr, w_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, out_ptr, out_scale_ptr,
    num_outputs, num_inputs, stride_x, stride_w, stride_x_scale, stride_x_group, stride_w_scale,
    T: tl.constexpr, BLOCK_T: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    TILES: tl.constexpr, HAS_SCALES: tl.constexpr, IN_BLOCKS: tl.constexpr, GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr, IS_GATED: tl.constexpr, PRODUCT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[t, o] = sum over i of x[t, i] * w[o, i] of ROWS outputs, in fp32 without tensor cores.

    IS_GATED: silu(out[t, o]) * out[t, num_outputs + o], both rounded to PRODUCT before.
    IN_BLOCKS: GROUP inputs of a token share a scale, and GROUP x GROUP weights.
    """
    outputs = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tokens = tl.arange(0, BLOCK_T)[:, None, None]
    inputs = tl.arange(0, BLOCK)[None, None, :]
    in_band = (outputs < num_outputs)[None, :, None]
    w_rows = w_ptr + (outputs.to(tl.int64) * stride_w)[None, :, None]
    up_rows = w_rows + num_outputs.to(tl.int64) * stride_w
    let_next_start(PDL)
    w = _load_weights(w_rows, inputs, in_band, num_inputs)
    if IS_GATED:
        up = _load_weights(up_rows, inputs, in_band, num_inputs)
    wait_for_previous(PDL)
    x_rows = x_ptr + tokens * stride_x
    x = tl.load(x_rows + inputs, mask=(tokens < T) & (inputs < num_inputs), other=0.0)
    acc = _products(
        w, x, 0, tokens, outputs, x_scale_ptr, w_scale_ptr, num_inputs,
        stride_x_scale, stride_x_group, stride_w_scale, T, BLOCK, GROUP, IN_BLOCKS,
    )  # fmt: skip
    if IS_GATED:
        up_acc = _products(
            up, x, 0, tokens, num_outputs + outputs, x_scale_ptr, w_scale_ptr, num_inputs,
            stride_x_scale, stride_x_group, stride_w_scale, T, BLOCK, GROUP, IN_BLOCKS,
        )  # fmt: skip
    for tile in tl.static_range(1, TILES):
        at = tile * BLOCK + inputs
        w = _load_weights(w_rows, at, in_band, num_inputs)
        x = tl.load(x_rows + at, mask=(tokens < T) & (at < num_inputs), other=0.0)
        acc += _products(
            w, x, tile, tokens, outputs, x_scale_ptr, w_scale_ptr, num_inputs,
            stride_x_scale, stride_x_group, stride_w_scale, T, BLOCK, GROUP, IN_BLOCKS,
        )  # fmt: skip
        if IS_GATED:
            up = _load_weights(up_rows, at, in_band, num_inputs)
            up_acc += _products(
                up, x, tile, tokens, num_outputs + outputs, x_scale_ptr, w_scale_ptr, num_inputs,
                stride_x_scale, stride_x_group, stride_w_scale, T, BLOCK, GROUP, IN_BLOCKS,
            )  # fmt: skip

    tokens = tl.arange(0, BLOCK_T)[:, None]
    outputs = outputs[None, :]
    is_output = outputs < num_outputs
    y = _finished(
        tl.sum(acc, axis=2), outputs, is_output, tokens, x_scale_ptr, w_scale_ptr, bias_ptr,
        stride_x_scale, stride_w_scale, T, HAS_SCALES, IN_BLOCKS, HAS_BIAS,
    )  # fmt: skip
    if IS_GATED:
        up_y = _finished(
            tl.sum(up_acc, axis=2), num_outputs + outputs, is_output, tokens,
            x_scale_ptr, w_scale_ptr, bias_ptr,
            stride_x_scale, stride_w_scale, T, HAS_SCALES, IN_BLOCKS, HAS_BIAS,
        )  # fmt: skip
        y, up_y = y.to(PRODUCT).to(tl.float32), up_y.to(PRODUCT).to(tl.float32)
        y = y / (1.0 + tl.exp(-y)) * up_y
    if out_ptr.dtype.element_ty.primitive_bitwidth == 8:
        y = tl.minimum(tl.maximum(y / tl.load(out_scale_ptr), -448.0), 448.0)
    out_ptr += tokens * num_outputs + outputs
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
    num_tokens, num_inputs = x_TI.shape
    num_outputs = weight_OI.shape[0] // (2 if is_gated else 1)
    assert x_TI.stride(1) == weight_OI.stride(1) == 1, (x_TI.stride(), weight_OI.stride())
    c = config or gemv_config(*weight_OI.shape, weight_OI.element_size(), num_tokens)
    out_dtype = dtype if out_scale_1 is None else torch.float8_e4m3fn
    out_TO = torch.empty((num_tokens, num_outputs), dtype=out_dtype, device=x_TI.device)
    in_blocks = weight_scale is not None and weight_scale.dim() == 2
    strides = scale_strides(scale, weight_scale)
    _gemv[(triton.cdiv(num_outputs, c.rows),)](
        x_TI, weight_OI, scale, weight_scale, bias_O, out_TO, out_scale_1,
        num_outputs, num_inputs, x_TI.stride(0), weight_OI.stride(0), *strides,
        T=num_tokens, BLOCK_T=triton.next_power_of_2(num_tokens), ROWS=c.rows, BLOCK=c.block,
        TILES=triton.cdiv(num_inputs, c.block), HAS_SCALES=scale is not None,
        IN_BLOCKS=in_blocks, GROUP=fp8.BLOCK, HAS_BIAS=bias_O is not None, IS_GATED=is_gated,
        PRODUCT=TRITON_DTYPES[dtype], num_warps=c.num_warps, **launch_options(x_TI),
    )  # fmt: skip
    return out_TO


@dense_linear.impl(
    "tiles",
    needs=arch(90),
    fits=lambda x_TI, weight_OI, bias_O=None: (
        x_TI.element_size() == 2 and is_quicker(x_TI.shape[0], weight_OI)
    ),
)
def dense_linear_tiles(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    return tiles(x_TI, None, weight_OI, None, bias_O, x_TI.dtype)


@dense_linear.impl(
    "gemv",
    needs=arch(80),
    fits=lambda x_TI, weight_OI, bias_O=None: 0 < x_TI.shape[0] <= MAX_GEMV_TOKENS,
)
def dense_linear_gemv(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    return gemv(x_TI, None, weight_OI, None, bias_O, x_TI.dtype)


gated_linear.impl(
    "gemv", needs=arch(80), fits=lambda x_TI, *_: 0 < x_TI.shape[0] < MIN_TILES_TOKENS
)(functools.partial(gemv, is_gated=True))
gated_linear.impl("tiles", needs=arch(80), fits=lambda x_TI, *_: 0 < x_TI.shape[0] <= MAX_TOKENS)(
    functools.partial(tiles, is_gated=True)
)
