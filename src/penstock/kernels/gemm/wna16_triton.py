"""W4A16 and W8A16 GEMM on a GPU: weights are dequantized in registers, for tensor cores.

A tile of the matrix is 16 rows per warp and 128 inputs. How words lie in memory (`wna16_packing`)
and how rows are named here are such that the codes a thread has read are just those of its MMA
fragment. Integers are exact in 16 bits, so is FP4 times its scales; scales of the other kinds
are multiplied with the accumulators of their groups. The table of NF4 is rounded to 16 bits.

Up to 256 tokens: one kernel, whatever the kind; on Hopper that of `wna16_hopper`, up to 512. More:
weights are dequantized, then torch's GEMM. The same kernel computes experts (`moe.wna16_triton`).

Legend: T tokens, I inputs, O outputs, R rows of a program, J quarters of a tile; P pairs of a token
and an expert, B blocks of M pairs.
"""

import functools
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels import tuned
from penstock.kernels.device import num_sms
from penstock.kernels.gemm.fp4_dequantize import bf16_pair, halves, mxfp4_pairs, scaled_pairs
from penstock.kernels.gemm.reduce import combine
from penstock.kernels.gemm.wna16 import weight_only_linear
from penstock.kernels.gemm.wna16_dequantize import (
    e4m3_pairs,
    fp4_factors,
    int4_pairs,
    int8_pairs,
    minus_zeros,
    nf4_pairs,
)
from penstock.kernels.gemm.wna16_packing import TILE, GpuPackedWeight
from penstock.kernels.hopper import HopperKernels
from penstock.kernels.launch import jit
from penstock.kernels.moe.weights import pointer
from penstock.kernels.op import arch, hopper
from penstock.kernels.pdl import launch_options, let_next_start, wait_for_previous
from penstock.kernels.quantized_weight import NF4_VALUES
from penstock.kernels.sizes import cdiv, next_power_of_2

_MAX_TOKENS = 256  # with dequantization in the GEMM; more dequantize first
MAX_BLOCK_T = 64
_HOPPER = HopperKernels("penstock.kernels.gemm.wna16_hopper", "GEMMs with low-bit weights run")


@dataclass(frozen=True, slots=True)
class WeightOnlyConfig:
    """Launch config."""

    num_warps: int
    slabs: int  # of 16 rows for each warp
    tiles: int  # of 128 inputs, in one go
    splits: int  # split-K
    num_stages: int


@triton.jit
def _as_pair(low, high, DTYPE: tl.constexpr):
    return tl.join(low.to(DTYPE), high.to(DTYPE))


@triton.jit
def _e4m3(codes):
    """Their values in fp32: exponents begin at 2^-6, and at 2^-126 there."""
    bits = ((codes & 128) << 24) | ((codes & 127) << 20)
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36


@triton.jit
def _nf4_code(words, K: tl.constexpr):
    """The K-th of a word."""
    return ((words >> (4 * K)) & 7) | (((words >> (8 * (K % 4) + (7 if K < 4 else 3))) & 1) << 3)


@triton.jit
def _numbers(
    words, upper, zeros, scales, table_ptr,
    J: tl.constexpr, KIND: tl.constexpr, DTYPE: tl.constexpr, AS_BF16: tl.constexpr,
):  # fmt: skip
    """[R, 16, 2]: what the words' J-th pairs stand for. fp4: with their scales, and AS_BF16 2^-19
    times that."""
    if AS_BF16:
        if KIND == "int4":
            minus = tl.broadcast_to(minus_zeros(zeros)[:, None], words.shape)
            pairs = int4_pairs(words, minus, J)
        elif KIND == "int8":
            pairs = int8_pairs(words, upper, J)
        elif KIND == "e4m3":
            pairs = e4m3_pairs(words, upper, J)
        elif KIND == "nf4":
            pairs = nf4_pairs(words, J)
        else:
            pairs = scaled_pairs(mxfp4_pairs(words, J), fp4_factors(scales, J), J)
        result = bf16_pair(pairs)
    elif KIND == "fp4":
        low, high = halves(mxfp4_pairs(words, J))
        power = (scales >> (8 * J)) & 255
        bits = (((power >> 3) + 117) << 23) | ((power & 7) << 20)
        factor = bits.to(tl.float32, bitcast=True)
        result = _as_pair(
            low * 8.507059173023462e37 * factor, high * 8.507059173023462e37 * factor, DTYPE
        )
    elif KIND == "nf4":
        low, high = _nf4_code(words, 2 * J), _nf4_code(words, 2 * J + 1)
        result = _as_pair(tl.load(table_ptr + low), tl.load(table_ptr + high), DTYPE)
    else:
        low, high = (words >> (4 * J)) & 15, (words >> (4 * J + 16)) & 15
        if KIND == "int4":
            result = _as_pair(low - zeros[:, None], high - zeros[:, None], DTYPE)
        elif KIND == "int8":
            low += ((upper >> (4 * J)) & 15) * 16 - 128
            high += ((upper >> (4 * J + 16)) & 15) * 16 - 128
            result = _as_pair(low, high, DTYPE)
        else:
            low |= ((upper >> (4 * J)) & 15) << 4
            high |= ((upper >> (4 * J + 16)) & 15) << 4
            result = _as_pair(_e4m3(low), _e4m3(high), DTYPE)
    return result


@triton.jit
def _left(
    words, upper, zeros, scales, table_ptr, FIRST: tl.constexpr, NUM: tl.constexpr,
    KIND: tl.constexpr, SLABS: tl.constexpr, WARPS: tl.constexpr, DTYPE: tl.constexpr,
    AS_BF16: tl.constexpr,
):  # fmt: skip
    """[R, 32 NUM] of the quarters from FIRST on: of each slab of rows those behind the first half
    become the second eight rows of their warps."""
    R: tl.constexpr = 16 * WARPS * SLABS
    a = _numbers(words, upper, zeros, scales, table_ptr, FIRST, KIND, DTYPE, AS_BF16)
    if NUM == 1:
        parts = tl.reshape(a, (SLABS, 2, WARPS, 8, 4, 4, 2))
        parts = tl.permute(parts, (0, 2, 1, 3, 5, 4, 6))
    else:
        b = _numbers(words, upper, zeros, scales, table_ptr, FIRST + 1, KIND, DTYPE, AS_BF16)
        if NUM == 2:
            parts = tl.reshape(tl.join(a, b), (SLABS, 2, WARPS, 8, 4, 4, 2, 2))
            parts = tl.permute(parts, (0, 2, 1, 3, 7, 5, 4, 6))
        else:
            c = _numbers(words, upper, zeros, scales, table_ptr, FIRST + 2, KIND, DTYPE, AS_BF16)
            d = _numbers(words, upper, zeros, scales, table_ptr, FIRST + 3, KIND, DTYPE, AS_BF16)
            both = tl.join(tl.join(a, c), tl.join(b, d))
            parts = tl.reshape(both, (SLABS, 2, WARPS, 8, 4, 4, 2, 2, 2))
            parts = tl.permute(parts, (0, 2, 1, 3, 7, 8, 5, 4, 6))
    return tl.reshape(parts, (R, 32 * NUM))


@triton.jit
def _fp4_scales(scales_ptr, rows, is_row):
    """[R, 16]: the four scales of each word's inputs; the first two words of four have the even
    groups."""
    even = tl.load(scales_ptr + rows * 2, mask=is_row, other=0)
    odd = tl.load(scales_ptr + rows * 2 + 1, mask=is_row, other=0)
    is_even = (tl.arange(0, 16) % 4 < 2)[None, :]
    return tl.where(is_even, even[:, None], odd[:, None])


@jit(do_not_specialize=["num_tokens", "tiles_each"])
def _wna16(
    x_ptr, order_ptr, w_ptr, scales_ptr, zeros_ptr, outer_ptr, bias_ptr, table_ptr, out_ptr,
    slots_ptr, pairs_ptr, weights_ptr, num_tokens, out_features, in_features, num_slots, stride_x,
    stride_w, stride_scales, tiles_each, tiles_per_scale,
    KIND: tl.constexpr, PLANES: tl.constexpr, SCALES: tl.constexpr, IS_ORDERED: tl.constexpr,
    HAS_ZEROS: tl.constexpr, HAS_OUTER: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCKS: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr, IS_WEIGHTED: tl.constexpr, BLOCK_T: tl.constexpr,
    SLABS: tl.constexpr, WARPS: tl.constexpr, TILES: tl.constexpr, ON_GPU: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out[split, t, o] = sum over a split's inputs of x[t, i] * w[o, i]; the first adds the bias.

    Program (rows, split, tokens). SCALES of a tile are multiplied with accumulators of 128 / SCALES
    inputs. BLOCKS "of tokens": one matrix for all. Else each block of tokens has that of its slot,
    and tokens are pairs of one and an expert, with x[pair // PAIRS_PER_ROW]; IS_WEIGHTED times the
    pair's weight. "of a slot": blocks were sorted; "of a pair": a block is one pair.
    """
    let_next_start(PDL)
    R: tl.constexpr = 16 * WARPS * SLABS
    AS_BF16: tl.constexpr = ON_GPU and x_ptr.dtype.element_ty == tl.bfloat16
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty if ON_GPU else tl.float32
    NUM: tl.constexpr = 4 // SCALES
    first_row = tl.program_id(0) * R
    rows = first_row + tl.arange(0, R)
    is_row = rows < out_features
    # Rows of the accumulator: of a warp's 16 the second eight are those behind a slab's first half.
    at = tl.arange(0, R)
    half = at // 8 % 2
    outputs = at // (16 * WARPS) * (16 * WARPS) + half * (8 * WARPS) + at // 16 % WARPS * 8 + at % 8
    outputs += first_row
    is_output = outputs < out_features
    wait_for_previous(PDL)
    block = tl.program_id(2)
    tokens = block * BLOCK_T + tl.arange(0, BLOCK_T)
    if BLOCKS != "of tokens":
        slot = tl.load(slots_ptr + block).to(tl.int64)
        if slot >= num_slots:
            return
        if BLOCKS == "of a slot":
            tokens = tl.load(pairs_ptr + tokens)
        else:
            tokens = tl.where(tl.arange(0, BLOCK_T) == 0, block, num_tokens)
        w_ptr += slot * stride_w
        scales_ptr += slot * stride_scales
        zeros_ptr += slot * stride_scales
        outer_ptr += slot * out_features
        bias_ptr += slot * out_features
        order_ptr += slot * in_features
    is_token = tokens < num_tokens
    x_rows = x_ptr + (tokens // PAIRS_PER_ROW).to(tl.int64)[:, None] * stride_x
    first_tile = tl.program_id(1) * tiles_each
    end_tile = tl.minimum(first_tile + tiles_each, tl.cdiv(in_features, 128))
    words_in_row = tl.arange(0, 16)[None, :]
    zeros = tl.full((R,), 8, tl.int32)
    scales = tl.zeros((R, 16), tl.int32)
    acc = tl.zeros((R, BLOCK_T), tl.float32)
    for start in range(first_tile, end_tile, TILES):
        for step in tl.static_range(TILES):
            tile = start + step
            is_here, is_sum = is_row, is_output
            if step > 0:
                is_here &= at < tl.where(tile < end_tile, R, 0)
                is_sum &= at < tl.where(tile < end_tile, R, 0)
            w_at = w_ptr + (tile.to(tl.int64) * out_features + rows)[:, None] * (16 * PLANES)
            words = tl.load(w_at + words_in_row, mask=is_here[:, None], other=0)
            upper = words
            if PLANES == 2:
                upper = tl.load(w_at + 16 + words_in_row, mask=is_here[:, None], other=0)
            if KIND == "fp4":
                scales = _fp4_scales(scales_ptr + tile * out_features * 2, rows, is_here)
            for part in tl.static_range(SCALES):
                group = tile // tiles_per_scale * out_features
                if HAS_ZEROS:
                    zeros_at = zeros_ptr + (group + rows) * SCALES + part
                    zeros = tl.load(zeros_at, mask=is_here, other=0).to(tl.int32)
                inputs = tile * 128 + part * (32 * NUM) + tl.arange(0, 32 * NUM)
                is_input = inputs < in_features
                if step > 0:
                    is_input &= inputs < end_tile * 128
                columns = inputs
                if IS_ORDERED:
                    columns = tl.load(order_ptr + inputs, mask=is_input, other=0)
                mask = is_token[:, None] & is_input[None, :]
                x = tl.load(x_rows + columns[None, :], mask=mask, other=0.0).to(DTYPE)
                left = _left(
                    words, upper, zeros, scales, table_ptr, part * NUM, NUM, KIND, SLABS, WARPS,
                    DTYPE, AS_BF16,
                )  # fmt: skip
                if KIND == "fp4":
                    acc = tl.dot(left, tl.trans(x), acc, input_precision="ieee")
                else:
                    sums = tl.dot(left, tl.trans(x), input_precision="ieee")
                    scale_at = scales_ptr + (group + outputs) * SCALES + part
                    scale = tl.load(scale_at, mask=is_sum, other=0.0).to(tl.float32)
                    acc += sums * scale[:, None]
    if KIND == "fp4" and AS_BF16:
        acc *= 524288.0
    if HAS_OUTER:
        acc *= tl.load(outer_ptr + outputs, mask=is_output, other=0.0)[:, None]
    if HAS_BIAS:
        is_first = is_output & (outputs < tl.where(first_tile == 0, out_features, 0))
        acc += tl.load(bias_ptr + outputs, mask=is_first, other=0.0).to(tl.float32)[:, None]
    if IS_WEIGHTED:
        acc *= tl.load(weights_ptr + tokens, mask=is_token, other=0.0)[None, :]
    to = (tl.program_id(1) * num_tokens + tokens).to(tl.int64)[None, :] * out_features
    mask = is_output[:, None] & is_token[None, :]
    tl.store(out_ptr + to + outputs[:, None], acc.to(out_ptr.dtype.element_ty), mask=mask)


@jit
def _dequantize(
    order_ptr, w_ptr, scales_ptr, zeros_ptr, outer_ptr, table_ptr, out_ptr,
    out_features, in_features, tiles_per_scale,
    KIND: tl.constexpr, PLANES: tl.constexpr, SCALES: tl.constexpr, IS_ORDERED: tl.constexpr,
    HAS_ZEROS: tl.constexpr, HAS_OUTER: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """out[o, i] = w[o, i] of R outputs and 128 inputs."""
    rows, tile = tl.program_id(0) * R + tl.arange(0, R), tl.program_id(1)
    is_row = rows < out_features
    w_at = w_ptr + (tile.to(tl.int64) * out_features + rows)[:, None] * (16 * PLANES)
    w_at += tl.arange(0, 16)[None, :]
    words = tl.load(w_at, mask=is_row[:, None], other=0)
    upper = words
    if PLANES == 2:
        upper = tl.load(w_at + 16, mask=is_row[:, None], other=0)
    zeros = tl.full((R,), 8, tl.int32)
    scales = tl.zeros((R, 16), tl.int32)
    outer = tl.full((R,), 1.0, tl.float32)
    if KIND == "fp4":
        scales = _fp4_scales(scales_ptr + tile * out_features * 2, rows, is_row)
    if HAS_OUTER:
        outer = tl.load(outer_ptr + rows, mask=is_row, other=0.0)
    for j in tl.static_range(4):
        at = (tile // tiles_per_scale * out_features + rows) * SCALES + j * SCALES // 4
        if HAS_ZEROS:
            zeros = tl.load(zeros_ptr + at, mask=is_row, other=0).to(tl.int32)
        scale = outer
        if KIND != "fp4":
            scale *= tl.load(scales_ptr + at, mask=is_row, other=0.0).to(tl.float32)
        pairs = _numbers(words, upper, zeros, scales, table_ptr, j, KIND, tl.float32, False)
        pairs = tl.permute(tl.reshape(pairs, (R, 4, 4, 2)), (0, 2, 1, 3))
        values = tl.reshape(pairs, (R, 32)) * scale[:, None]
        inputs = tile * 128 + j * 32 + tl.arange(0, 32)
        is_input = inputs < in_features
        columns = inputs
        if IS_ORDERED:
            columns = tl.load(order_ptr + inputs, mask=is_input, other=0)
        to = out_ptr + rows.to(tl.int64)[:, None] * in_features + columns[None, :]
        mask = is_row[:, None] & is_input[None, :]
        tl.store(to, values.to(out_ptr.dtype.element_ty), mask=mask)


@functools.cache
def _table(device: torch.device) -> Tensor:
    return torch.tensor(NF4_VALUES, device=device)


@functools.cache
def weight_only_config(
    out_features: int, in_features: int, bits: int, num_tokens: int
) -> WeightOnlyConfig:
    """Small M is memory-bound: split-K until four programs per SM are in flight. Large M is
    bound by the tensor cores, and split-K costs a reduction."""
    num_warps, slabs = 4, 1 if num_tokens <= 32 else 2
    num_blocks = cdiv(out_features, 16 * num_warps * slabs)
    programs = (4 if num_tokens <= 32 else 2) * num_sms()
    tiles = 2 if num_tokens <= 32 else 1
    most = max(1, cdiv(in_features, TILE * tiles) // 2)
    splits = max(1, min(programs // num_blocks, most, 16))
    usual = WeightOnlyConfig(
        num_warps, slabs, tiles, splits, num_stages=4 if num_tokens <= 32 else 3
    )
    return tuned.best(
        "weight_only",
        usual,
        outputs=out_features,
        inputs=in_features,
        bits=bits,
        tokens=max(16, next_power_of_2(num_tokens)),
    )


def _scales_per_tile(weight: GpuPackedWeight) -> int:
    """That accumulators are multiplied with; those of fp4 are in the weights already."""
    return 1 if weight.kind == "fp4" else weight.scales.shape[-1]


def _tiles_per_scale(weight: GpuPackedWeight) -> int:
    return cdiv(weight.num_tiles, weight.scales.shape[-3])


def dequantize_gpu(weight: GpuPackedWeight, dtype: torch.dtype) -> Tensor:
    """The dequantized matrix [O, I], its inputs in their own order."""
    device = weight.words_NOPW.device
    out_OI = torch.empty((weight.out_features, weight.in_features), dtype=dtype, device=device)
    _dequantize[(cdiv(weight.out_features, 64), weight.num_tiles)](
        weight.order_I, weight.words_NOPW, weight.scales, weight.zeros, weight.outer_O,
        _table(device), out_OI, weight.out_features, weight.in_features, _tiles_per_scale(weight),
        KIND=weight.kind, PLANES=weight.words_NOPW.shape[-2], SCALES=_scales_per_tile(weight),
        IS_ORDERED=weight.order_I is not None,
        HAS_ZEROS=weight.zeros is not None, HAS_OUTER=weight.outer_O is not None, R=64,
        num_warps=4,
    )  # fmt: skip
    return out_OI


def multiply(
    x: Tensor,
    weight: GpuPackedWeight,
    bias: Tensor | None,
    num_tokens: int,
    block_t: int,
    config: WeightOnlyConfig | None,
    *,
    slots_B: Tensor | None = None,
    pairs_BM: Tensor | None = None,
    weights_P: Tensor | None = None,
) -> Tensor:
    """[splits, tokens, outputs]; with `slots_B` tokens are pairs, `pairs_BM` or one to a block."""
    assert x.stride(1) == 1, x.stride()
    out_features, in_features = weight.out_features, weight.in_features
    c = config or weight_only_config(out_features, in_features, weight.bits, block_t)
    if config is None and slots_B is not None and weight.num_slots > 1:
        c = replace(c, splits=max(1, c.splits // len(slots_B)))  # slots fill the GPU, too
    tiles_each = cdiv(cdiv(weight.num_tiles, c.tiles), c.splits) * c.tiles
    num_splits = cdiv(weight.num_tiles, tiles_each)
    dtype = x.dtype if num_splits == 1 else torch.float32
    out = torch.empty((num_splits, num_tokens, out_features), dtype=dtype, device=x.device)
    blocks = "of tokens"
    if slots_B is not None:
        blocks = "of a pair" if pairs_BM is None else "of a slot"
    num_blocks = cdiv(num_tokens, block_t) if slots_B is None else len(slots_B)
    _wna16[(cdiv(out_features, 16 * c.num_warps * c.slabs), num_splits, num_blocks)](
        x, pointer(weight.order_I, out), weight.words_NOPW, weight.scales,
        pointer(weight.zeros, out), pointer(weight.outer_O, out), pointer(bias, out),
        _table(x.device), out, slots_B, pairs_BM, weights_P, num_tokens, out_features, in_features,
        weight.num_slots, x.stride(0), weight.words_NOPW.stride(0), weight.scales.stride(0),
        tiles_each, _tiles_per_scale(weight),
        KIND=weight.kind, PLANES=weight.words_NOPW.shape[-2], SCALES=_scales_per_tile(weight),
        IS_ORDERED=weight.order_I is not None,
        HAS_ZEROS=weight.zeros is not None, HAS_OUTER=weight.outer_O is not None,
        HAS_BIAS=bias is not None, BLOCKS=blocks, PAIRS_PER_ROW=num_tokens // x.shape[0],
        IS_WEIGHTED=weights_P is not None, BLOCK_T=block_t, SLABS=c.slabs, WARPS=c.num_warps,
        TILES=c.tiles, ON_GPU=x.is_cuda, num_warps=c.num_warps, num_stages=c.num_stages,
        **launch_options(x),
    )  # fmt: skip
    return out


@weight_only_linear.impl(
    "hopper",
    needs=hopper(),
    fits=lambda x_TI, weight, bias_O: (
        0 < x_TI.shape[0] <= 2 * _MAX_TOKENS
        and (kernels := _HOPPER.module(x_TI)) is not None
        and kernels.fits(x_TI, weight)
    ),
)
def weight_only_linear_hopper(x_TI, weight, bias_O):
    y_TO = _HOPPER.result("linear", x_TI, weight, bias_O)
    if y_TO is not None:
        return y_TO
    if x_TI.shape[0] > _MAX_TOKENS:
        return weight_only_linear_dequantized(x_TI, weight, bias_O)
    return weight_only_linear_triton(x_TI, weight, bias_O)


@weight_only_linear.impl(
    "triton",
    needs=arch(80),
    fits=lambda x_TI, weight, bias_O: 0 < x_TI.shape[0] <= _MAX_TOKENS,
)
def weight_only_linear_triton(x_TI, weight, bias_O, config: WeightOnlyConfig | None = None):
    num_tokens = x_TI.shape[0]
    block_t = min(MAX_BLOCK_T, max(16, next_power_of_2(num_tokens)))
    parts = multiply(x_TI, weight, bias_O, num_tokens, block_t, config)
    return parts[0] if len(parts) == 1 else combine(parts, num_tokens, x_TI.dtype)


@weight_only_linear.impl("dequantized", needs=arch(80))
def weight_only_linear_dequantized(x_TI, weight, bias_O):
    return F.linear(x_TI, dequantize_gpu(weight, x_TI.dtype), bias_O)
