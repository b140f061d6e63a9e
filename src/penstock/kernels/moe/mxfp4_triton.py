"""GEMMs of MXFP4 experts on a GPU, for any number of tokens: codes are dequantized to bfloat16 in
registers, where the MMA takes them.

A tile of the matrix is 16 rows per warp and 128 inputs. How words lie in memory (`weights`) and how
rows are named here are such that the codes a thread has read are just those of its MMA fragment, so
nothing passes through shared memory on the way.

Legend: T tokens, S slots, K experts of a token, P = T * K pairs, B blocks of pairs, M pairs of a
block, D hidden size, F features of an expert; N outputs of either GEMM.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels import tuned
from penstock.kernels.gemm.fp4_dequantize import (
    bf16_pair,
    factors_of,
    halves,
    mxfp4_pairs,
    scaled_pairs,
)
from penstock.kernels.gemm.reduce import combine
from penstock.kernels.hopper import HopperKernels
from penstock.kernels.launch import jit
from penstock.kernels.moe.align import rows_per_block, sorted_pairs
from penstock.kernels.moe.gate import Gate
from penstock.kernels.moe.reference import experts
from penstock.kernels.moe.weights import ExpertWeights
from penstock.kernels.op import arch, hopper
from penstock.kernels.pdl import launch_options, let_next_start, wait_for_previous
from penstock.kernels.sizes import cdiv
from penstock.kernels.triton_math import gate_of, in_bands

_MAX_UNSORTED = 4  # tokens; so few seldom share an expert
_MIN_ON_HOPPER = 3  # tokens; 60.6 us instead of 68.8 on an H200, fewer were not measured
_HOPPER = HopperKernels("penstock.kernels.moe.mxfp4_hopper", "experts in MXFP4 are computed")


@dataclass(frozen=True, slots=True)
class Mxfp4Config:
    """Launch config of one GEMM."""

    num_warps: int
    slabs: int  # of 16 rows for each warp; with a gate, of 8 outputs
    tiles: int  # of 128 inputs, in one go
    splits: int  # split-K; with a gate there is one
    num_stages: int
    band: int  # blocks of pairs that follow each other before the next outputs


@triton.jit
def _numbers(words, powers, J: tl.constexpr, AS_BF16: tl.constexpr):
    """[R, 16, 2]: 2^-32 times the values of the J-th group of inputs."""
    pairs = mxfp4_pairs(words, J)
    if AS_BF16:
        factors = tl.broadcast_to(factors_of(powers, J)[:, None], pairs.shape)
        numbers = bf16_pair(scaled_pairs(pairs, factors, J))
    else:
        factor = (((powers >> (8 * J)) & 255) << 23).to(tl.float32, bitcast=True)[:, None]
        low, high = halves(pairs)
        numbers = tl.join(low * factor, high * factor)
    return numbers


@triton.jit
def _left(words, powers, SLABS: tl.constexpr, WARPS: tl.constexpr, AS_BF16: tl.constexpr):
    """[R, 128] of R = 16 WARPS SLABS rows: of each slab those behind the first half become the
    second eight rows of their warps."""
    even = tl.join(_numbers(words, powers, 0, AS_BF16), _numbers(words, powers, 2, AS_BF16))
    odd = tl.join(_numbers(words, powers, 1, AS_BF16), _numbers(words, powers, 3, AS_BF16))
    both = tl.join(even, odd)  # [row, word, neighbor, half of the tile, group of the half]
    parts = tl.reshape(both, (SLABS, 2, WARPS, 8, 4, 4, 2, 2, 2))
    parts = tl.permute(parts, (0, 2, 1, 3, 7, 8, 5, 4, 6))
    return tl.reshape(parts, (16 * WARPS * SLABS, 128))


@triton.jit
def _prefetch(w_ptr, first_tile, end_tile, first_row, num_rows, ROWS: tl.constexpr):
    """Have the words of ROWS rows and some tiles brought into the L2 cache."""
    words = tl.arange(0, ROWS // 2)[None, :] * 32  # the first of each line of the cache
    words = tl.minimum(words, (num_rows - first_row) * 16 - 1)
    for tile in range(first_tile, end_tile, 8):
        tiles = tl.minimum(tile + tl.arange(0, 8), end_tile - 1)[:, None]
        at = w_ptr + (tiles * num_rows + first_row) * 16 + words
        tl.inline_asm_elementwise(
            "{ prefetch.global.L2 [$1]; mov.u32 $0, 0; }", "=r,l",
            [at.to(tl.uint64, bitcast=True)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@jit(do_not_specialize=["num_pairs", "num_blocks"])
def _mxfp4(
    x_ptr, w_ptr, powers_ptr, bias_ptr, weights_ptr, y_ptr, slots_ptr, pairs_ptr, stride_x,
    stride_w, stride_powers, num_pairs, num_blocks, S, N, in_features, inputs_each,
    alpha, shift, limit,
    PAIRS_PER_ROW: tl.constexpr, BLOCK_M: tl.constexpr, SLABS: tl.constexpr, WARPS: tl.constexpr,
    TILES: tl.constexpr, BAND: tl.constexpr, IS_SORTED: tl.constexpr, IS_GATED: tl.constexpr,
    IS_WEIGHTED: tl.constexpr, HAS_BIAS: tl.constexpr, ON_GPU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A block of pairs times some outputs of its slot's matrix, with `inputs_each` of the inputs.

    y[pair, n] = x[pair // PAIRS_PER_ROW] . w[slot, n], IS_WEIGHTED times the pair's weight; gated
    gate(x . w[slot, n], x . w[slot, N + n]). Program (i, split) has the split-th part of the
    inputs and writes y[split]. Not sorted: a block is one pair, slots are those of pairs.
    """
    # Slots are older than what the second GEMM waits for: its weights are prefetched before (PDL).
    IS_EARLY: tl.constexpr = PDL and IS_WEIGHTED and not IS_SORTED
    if not IS_EARLY:
        wait_for_previous(PDL)
    let_next_start(PDL)
    ROWS: tl.constexpr = 16 * WARPS * SLABS
    OUTPUTS: tl.constexpr = ROWS // 2 if IS_GATED else ROWS
    num_n = tl.cdiv(N, OUTPUTS)
    block, column = in_bands(tl.program_id(0), num_blocks, num_n, BAND)
    first = column * OUTPUTS
    slot = tl.load(slots_ptr + block, cache_modifier=".cg").to(tl.int64)
    if slot >= S:
        wait_for_previous(IS_EARLY)
        return
    places = tl.arange(0, BLOCK_M)
    if IS_SORTED:
        pairs = tl.load(pairs_ptr + block * BLOCK_M + places)
    else:
        pairs = tl.where(places == 0, block, num_pairs)
    is_pair = pairs < num_pairs
    rows = tl.arange(0, ROWS)
    if IS_GATED:  # the first half of a slab's rows are the gate's
        HALF: tl.constexpr = 8 * WARPS
        features = first + rows // (2 * HALF) * HALF + rows % HALF
        is_row = features < N
        rows = features + rows // HALF % 2 * N
        num_rows = 2 * N
    else:
        rows = first + rows
        is_row = rows < N
        num_rows = N
    start = tl.program_id(1) * inputs_each
    end = tl.minimum(start + inputs_each, in_features)
    x_ptr += (pairs // PAIRS_PER_ROW).to(tl.int64)[:, None] * stride_x
    rows += start // 128 * num_rows
    words_at = w_ptr + slot * stride_w + rows[:, None] * 16 + tl.arange(0, 16)[None, :]
    powers_at = powers_ptr + slot * stride_powers + rows
    if IS_EARLY:
        _prefetch(w_ptr + slot * stride_w, start // 128, tl.cdiv(end, 128), first, N, ROWS)
        wait_for_previous(PDL)
    AS_BF16: tl.constexpr = ON_GPU and x_ptr.dtype.element_ty == tl.bfloat16
    acc = tl.zeros((ROWS, BLOCK_M), tl.float32)
    for first_input in range(start, end, 128 * TILES):
        for tile in tl.static_range(TILES):
            inputs = first_input + tile * 128 + tl.arange(0, 128)
            is_word = is_row
            if tile > 0:
                is_word &= tl.arange(0, ROWS) < tl.where(first_input + tile * 128 < end, ROWS, 0)
            words = tl.load(words_at + tile * num_rows * 16, mask=is_word[:, None], other=0)
            powers = tl.load(powers_at + tile * num_rows, mask=is_word, other=0)
            mask = is_pair[:, None] & (inputs < end)[None, :]
            x = tl.load(x_ptr + inputs[None, :], mask=mask, other=0.0)
            if not AS_BF16:
                x = x.to(tl.float32)
            left = _left(words, powers, SLABS, WARPS, AS_BF16)
            acc = tl.dot(left, tl.trans(x), acc, input_precision="ieee")
        words_at += TILES * num_rows * 16
        powers_at += TILES * num_rows

    acc = tl.reshape(acc * 4294967296.0, (SLABS, WARPS, 2, 8, BLOCK_M))
    outputs = first + tl.arange(0, OUTPUTS)
    is_output = outputs < N
    if IS_GATED:
        y, up = tl.split(tl.permute(acc, (0, 1, 3, 4, 2)))
        y, up = tl.reshape(y, (OUTPUTS, BLOCK_M)), tl.reshape(up, (OUTPUTS, BLOCK_M))
    else:
        y = tl.reshape(tl.permute(acc, (0, 2, 1, 3, 4)), (OUTPUTS, BLOCK_M))
    if HAS_BIAS:
        bias_ptr += slot * num_rows + outputs
        is_first = outputs < tl.where(start == 0, N, 0)  # of the splits: it enters the sum once
        y += tl.load(bias_ptr, mask=is_first, other=0.0).to(tl.float32)[:, None]
        if IS_GATED:
            up += tl.load(bias_ptr + N, mask=is_first, other=0.0).to(tl.float32)[:, None]
    if IS_GATED:
        y = gate_of(y, up, alpha, shift, limit)
    if IS_WEIGHTED:
        y *= tl.load(weights_ptr + pairs, mask=is_pair, other=0.0)[None, :]
    to = (tl.program_id(1) * num_pairs + pairs).to(tl.int64)[None, :] * N + outputs[:, None]
    mask = is_pair[None, :] & is_output[:, None]
    tl.store(y_ptr + to, y.to(y_ptr.dtype.element_ty), mask=mask)


@functools.cache
def mxfp4_config(out_features: int, in_features: int, rows: int, is_gated: bool) -> Mxfp4Config:
    """Few pairs are memory-bound: small programs, many in flight; with `rows` 1 so few that split-K
    is needed, too. Many are bound by the tensor cores: blocks of an expert close together, which
    find its weights in the L2.

    Where nothing was tuned, what is good on an H200 for gpt-oss-120b, us of both GEMMs
    (roofline): one token 27.9 (11.7), 32 tokens 319 (249), 256 tokens 517 (374).
    """
    if rows == 1:
        splits = 1 if is_gated else 2  # a gate needs the whole accumulator
        usual = Mxfp4Config(num_warps=4, slabs=1, tiles=2, splits=splits, num_stages=4, band=1)
    else:
        band = 1 if rows <= 32 else 4
        usual = Mxfp4Config(num_warps=4, slabs=2, tiles=1, splits=1, num_stages=3, band=band)
    return tuned.best("experts mxfp4", usual, outputs=out_features, inputs=in_features, rows=rows)


def _multiply(
    x: Tensor,
    weights: ExpertWeights,
    bias_SN: Tensor | None,
    weights_TK: Tensor,
    slots_B: Tensor,
    pairs_BM: Tensor | None,
    c: Mxfp4Config,
    *,
    gate: Gate | None = None,
    is_weighted: bool = False,
) -> Tensor:
    """[splits, P, N]; `x` has a row for each pair, or for each token."""
    assert weights.scale is not None and weights.values.is_contiguous() and x.stride(1) == 1
    num_pairs, is_gated = weights_TK.numel(), gate is not None
    out_features = weights.out_features // (2 if is_gated else 1)
    outputs_each = (8 if is_gated else 16) * c.num_warps * c.slabs
    tiles_each = cdiv(cdiv(weights.in_features, 128 * c.tiles), c.splits) * c.tiles
    num_splits = cdiv(weights.in_features, 128 * tiles_each)
    assert num_splits == 1 or gate is None, c
    dtype = x.dtype if num_splits == 1 else torch.float32
    out = torch.empty((num_splits, num_pairs, out_features), dtype=dtype, device=x.device)
    alpha, shift, limit = (gate.alpha, gate.shift, gate.limit) if gate else (0.0, 0.0, 0.0)
    num_blocks = slots_B.shape[0]
    _mxfp4[(cdiv(out_features, outputs_each) * num_blocks, num_splits)](
        x, weights.values, weights.scale, bias_SN, weights_TK, out, slots_B,
        slots_B if pairs_BM is None else pairs_BM,
        x.stride(0), weights.values.stride(0), weights.scale.stride(0), num_pairs, num_blocks,
        weights.num_slots, out_features, weights.in_features, 128 * tiles_each, alpha, shift, limit,
        PAIRS_PER_ROW=num_pairs // x.shape[0],
        BLOCK_M=16 if pairs_BM is None else pairs_BM.shape[1],
        SLABS=c.slabs, WARPS=c.num_warps, TILES=c.tiles, BAND=c.band,
        IS_SORTED=pairs_BM is not None, IS_GATED=is_gated, IS_WEIGHTED=is_weighted,
        HAS_BIAS=bias_SN is not None, ON_GPU=x.is_cuda,
        num_warps=c.num_warps, num_stages=c.num_stages, **launch_options(x),
    )  # fmt: skip
    return out


def _fits_hopper(x_TD: Tensor, gate_up: ExpertWeights, down: ExpertWeights) -> bool:
    kernels = _HOPPER.module(x_TD) if x_TD.shape[0] >= _MIN_ON_HOPPER else None
    return kernels is not None and kernels.fits(x_TD, gate_up, down)


@experts.impl(
    "hopper mxfp4",
    needs=hopper(),
    fits=lambda x_TD, slots_TK, weights_TK, gate_up, down, *_: _fits_hopper(x_TD, gate_up, down),
)
def experts_mxfp4_on_hopper(
    x_TD, slots_TK, weights_TK, gate_up, down, gate_up_bias_S2F, down_bias_SD, gate
):
    args = (x_TD, slots_TK, weights_TK, gate_up, down, gate_up_bias_S2F, down_bias_SD, gate)
    y_TD = _HOPPER.result("experts", *args)
    return experts_mxfp4(*args) if y_TD is None else y_TD


@experts.impl(
    "triton mxfp4",
    needs=arch(80),
    fits=lambda x_TD, slots_TK, weights_TK, gate_up, *_: (
        x_TD.shape[0] > 0 and gate_up.format == "mxfp4"
    ),
)
def experts_mxfp4(
    x_TD,
    slots_TK,
    weights_TK,
    gate_up,
    down,
    gate_up_bias_S2F,
    down_bias_SD,
    gate,
    rows: int | None = None,
    configs: tuple[Mxfp4Config, Mxfp4Config] | None = None,
):
    assert slots_TK.is_contiguous() and weights_TK.is_contiguous()
    num_pairs, num_slots = slots_TK.numel(), down.num_slots
    if x_TD.shape[0] <= _MAX_UNSORTED:
        rows, pairs_BM, slots_B = 1, None, slots_TK.view(-1)
    else:
        rows = rows or rows_per_block(num_pairs, num_slots, gate_up.format)
        pairs_BM, slots_B = sorted_pairs(slots_TK, num_slots, rows)
    up_config, down_config = configs or (
        mxfp4_config(gate_up.out_features, gate_up.in_features, rows, True),
        mxfp4_config(down.out_features, down.in_features, rows, False),
    )
    shared = (weights_TK, slots_B, pairs_BM)
    h_1PF = _multiply(x_TD, gate_up, gate_up_bias_S2F, *shared, up_config, gate=gate)
    parts = _multiply(h_1PF[0], down, down_bias_SD, *shared, down_config, is_weighted=True)
    masked_by = None if down.has_all else slots_TK
    return combine(parts, x_TD.shape[0], x_TD.dtype, masked_by, num_slots)
