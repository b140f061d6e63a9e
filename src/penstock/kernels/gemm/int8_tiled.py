"""INT8 GEMM on tensor cores (W8A8).

The weight is the left operand, so its outputs fill the rows of an MMA tile also at small M; 64 of
them for four warps let Hopper multiply out of shared memory (wgmma). Split-K fills the GPU.

The compiler lets an INT8 MMA finish before the next loads start (a float one it does not), so
occupancy above one, or long K blocks, keep the tensor cores busy.

Legend: T tokens, I inputs, O outputs, N splits of the inputs.
"""

import functools
from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from penstock.kernels.device import num_sms, probe
from penstock.kernels.gemm.int8_epilogue import (
    by_row,
    epilogue,
    load_scale_and_bias,
    reduce_split_k,
)
from penstock.kernels.gemm.split_k import choose_split_k
from penstock.kernels.launch import jit
from penstock.kernels.pdl import launch_options, let_next_start, wait_for_previous
from penstock.kernels.sizes import cdiv, next_power_of_2

_ALIGNED = 16  # bytes that are copied into shared memory at once
_GROUP_TOKENS = 2048  # whose programs follow each other: they find weights and tokens in the L2


@dataclass(frozen=True, slots=True)
class Int8GemmConfig:
    """Launch config."""

    outputs: int  # of a program
    tokens: int  # of a program
    inputs: int  # read at once
    num_warps: int
    num_stages: int
    programs: int  # resident on an SM


CONFIGS = (  # the first that has as many tokens as there are, or the last
    Int8GemmConfig(64, 16, 256, num_warps=4, num_stages=4, programs=2),
    Int8GemmConfig(64, 32, 256, num_warps=4, num_stages=4, programs=2),
    Int8GemmConfig(64, 64, 256, num_warps=4, num_stages=3, programs=2),
    Int8GemmConfig(64, 128, 128, num_warps=4, num_stages=4, programs=2),
    Int8GemmConfig(128, 128, 128, num_warps=8, num_stages=3, programs=2),
)
# For GPUs before Hopper, and for rows that are not aligned.
_BEFORE_HOPPER = Int8GemmConfig(64, 64, 128, num_warps=4, num_stages=3, programs=2)
_UNALIGNED = Int8GemmConfig(64, 32, 64, num_warps=4, num_stages=2, programs=2)


@jit(do_not_specialize=["num_tokens", "num_blocks", "tiles_each"])
def _int8_gemm(
    x_ptr, scale_ptr, w_ptr, w_scale_ptr, bias_ptr, out_ptr,
    num_tokens, num_blocks, out_features, in_features, tiles_each,
    stride_x, stride_scale, stride_w_scale,
    HAS_BIAS: tl.constexpr, IS_SPLIT: tl.constexpr, IS_EVEN: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, GROUP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out[t, o] = scale[t] * w_scale[o] * sum over i of x[t, i] * w[o, i], plus bias[o].

    IS_SPLIT (split-K): out[split, t, o] is the accumulator of the split's `tiles_each` blocks.
    IS_EVEN: inputs and outputs are multiples of their blocks.
    """
    let_next_start(PDL)
    num_rows = tl.cdiv(out_features, BLOCK_O)
    split = tl.program_id(0) // (num_rows * num_blocks)
    place = tl.program_id(0) % (num_rows * num_blocks)
    first_block = place // (num_rows * GROUP) * GROUP
    blocks_here = tl.minimum(num_blocks - first_block, GROUP)
    place %= num_rows * GROUP
    first_output = place // blocks_here * BLOCK_O
    first_token = (first_block + place % blocks_here) * BLOCK_T
    first_tile = split * tiles_each
    num_here = tl.minimum(tiles_each, tl.cdiv(in_features, BLOCK_I) - first_tile)

    rows, columns = tl.arange(0, BLOCK_O), tl.arange(0, BLOCK_T)
    inputs = tl.arange(0, BLOCK_I)
    is_output = first_output + rows < out_features
    is_token = first_token + columns < num_tokens
    w_ptr += first_output.to(tl.int64) * in_features + first_tile * BLOCK_I
    w_at = rows[:, None] * in_features + inputs[None, :]
    wait_for_previous(PDL)
    x_ptr += first_token.to(tl.int64) * stride_x + first_tile * BLOCK_I
    x_at = columns[None, :] * stride_x + inputs[:, None]
    acc = tl.zeros((BLOCK_O, BLOCK_T), tl.int32)
    for step in range(num_here):
        if IS_EVEN:
            w = tl.load(w_ptr + w_at)
            x = tl.load(x_ptr + x_at, mask=is_token[None, :], other=0)
        else:
            is_input = inputs < in_features - (first_tile + step) * BLOCK_I
            w = tl.load(w_ptr + w_at, mask=is_output[:, None] & is_input[None, :], other=0)
            x = tl.load(x_ptr + x_at, mask=is_token[None, :] & is_input[:, None], other=0)
        acc = tl.dot(w, x, acc, out_dtype=tl.int32)
        w_ptr += BLOCK_I
        x_ptr += BLOCK_I

    outputs, tokens = (first_output + rows)[:, None], (first_token + columns)[None, :]
    is_output, is_token = outputs < out_features, tokens < num_tokens
    if IS_SPLIT:
        out_ptr += split.to(tl.int64) * num_tokens * out_features
        y = acc
    else:
        scale = tl.load(scale_ptr + tokens * stride_scale, mask=is_token, other=0.0)
        w_scale, bias = load_scale_and_bias(
            w_scale_ptr, bias_ptr, outputs, is_output, stride_w_scale, HAS_BIAS
        )  # fmt: skip
        y = epilogue(acc, scale, w_scale, bias, HAS_BIAS)
    to = tokens.to(tl.int64) * out_features + outputs
    tl.store(out_ptr + to, y.to(out_ptr.dtype.element_ty), mask=is_output & is_token)


def _is_before_hopper() -> bool:
    return 0 < probe().arch < 90


def is_faster_than_int_mm(num_tokens: int, in_features: int) -> bool:
    """torch's _int_mm of 256, 1024 and 4096 tokens takes 1.3 to 1.9 times as long on an H200. Not
    measured on GPUs before that, nor with unaligned rows."""
    return num_tokens <= 64 or not (_is_before_hopper() or in_features % _ALIGNED)


@functools.cache
def int8_gemm_config(num_tokens: int, in_features: int) -> Int8GemmConfig:
    """The best of 4 to 9 on an H200. us of 4096 x 14336 (outputs x inputs; roofline 13.0) and of
    8192 x 28672 (52.0): 16 tokens 17.4 and 57.7, 64 19.9 and 62.9, 256 35.6 and 101.
    """
    if in_features % _ALIGNED:
        return _UNALIGNED
    if _is_before_hopper():
        return _BEFORE_HOPPER
    return next((c for c in CONFIGS if num_tokens <= c.tokens), CONFIGS[-1])


def num_splits(c: Int8GemmConfig, num_tokens: int, out_features: int, in_features: int) -> int:
    """Split-K factor; it takes few values, for each is a kernel to compile at start."""
    num_blocks = next_power_of_2(cdiv(num_tokens, c.tokens))
    num_programs = num_blocks * cdiv(out_features, c.outputs)
    at_a_time = c.programs * num_sms()
    return choose_split_k(num_programs, at_a_time, cdiv(in_features, c.inputs))


def int8_gemm(
    x_TI: Tensor,
    scale: Tensor,
    weight_OI: Tensor,
    weight_scale: Tensor,
    bias_O: Tensor | None,
    dtype: torch.dtype,
    config: Int8GemmConfig | None = None,
    splits: int | None = None,
) -> Tensor:
    """As `int8_linear`."""
    assert x_TI.stride(1) == 1 and weight_OI.is_contiguous(), (x_TI.stride(), weight_OI.stride())
    num_tokens, in_features = x_TI.shape
    out_features = weight_OI.shape[0]
    if num_tokens == 0:
        return torch.empty((0, out_features), dtype=dtype, device=x_TI.device)
    c = config or int8_gemm_config(num_tokens, in_features)
    num_blocks, num_rows = cdiv(num_tokens, c.tokens), cdiv(out_features, c.outputs)
    num_tiles = cdiv(in_features, c.inputs)
    splits = splits or num_splits(c, num_tokens, out_features, in_features)
    tiles_each = cdiv(num_tiles, splits)
    splits = cdiv(num_tiles, tiles_each)
    is_whole = in_features % c.inputs == out_features % c.outputs == 0
    out_NTO = torch.empty(
        (splits, num_tokens, out_features),
        dtype=dtype if splits == 1 else torch.int32,
        device=x_TI.device,
    )
    _int8_gemm[(splits * num_rows * num_blocks,)](
        x_TI, scale, weight_OI, weight_scale, bias_O, out_NTO,
        num_tokens, num_blocks, out_features, in_features, tiles_each,
        x_TI.stride(0), by_row(scale), by_row(weight_scale),
        HAS_BIAS=bias_O is not None, IS_SPLIT=splits > 1, IS_EVEN=is_whole,
        BLOCK_T=c.tokens, BLOCK_O=c.outputs, BLOCK_I=c.inputs,
        GROUP=max(1, _GROUP_TOKENS // c.tokens),
        num_warps=c.num_warps, num_stages=c.num_stages, **launch_options(x_TI),
    )  # fmt: skip
    return (
        out_NTO[0] if splits == 1 else reduce_split_k(out_NTO, scale, weight_scale, bias_O, dtype)
    )
