"""W4A16 and W8A16 GEMM on Hopper, warp-specialized.

A producer warp copies words, scales and inputs into shared memory by TMA, a tile of 128 inputs at a
time; four consumer warps dequantize codes to bfloat16 in registers and multiply them there (wgmma
with its left operand in registers). A program has 128 outputs in two slabs; split-K
fills the GPU. Group scales are multiplied with weights in bfloat16,
per-output scales with accumulators.

The first tiles of weights are on their way before the previous kernel has finished (PDL); inputs,
and all that is written, wait for it. The same kernel computes experts (`moe.wna16_hopper`): there a
block of tokens is one of pairs of a token and an expert, whose matrix it reads.

The result is that of `wna16_triton`, up to rounding. Triton's interpreter cannot run this:
tests/gpu compares it.

Legend: T tokens, I inputs, O outputs, M tokens of a block; S slots, P pairs of a token and an
expert, B blocks of pairs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from penstock.kernels.device import num_sms
from penstock.kernels.gemm import wna16_dequantize as decode
from penstock.kernels.gemm.fp4_dequantize import mxfp4_pairs, scaled_pairs
from penstock.kernels.gemm.reduce import combine
from penstock.kernels.gemm.split_k import choose_split_k
from penstock.kernels.gemm.wna16_packing import TILE, WORDS, GpuPackedWeight
from penstock.kernels.gluon_launch import jit as gluon_jit
from penstock.kernels.gluon_tools import (
    PANEL,
    copy,
    copy_panels,
    descriptor,
    pipeline_barriers,
    slab_of_pairs,
    view,
)
from penstock.kernels.moe.weights import pointer
from penstock.kernels.pdl import launch_options
from penstock.kernels.sizes import cdiv, next_power_of_2

_e4m3_pairs = gluon.jit(decode.e4m3_pairs.fn)
_fp4_factors = gluon.jit(decode.fp4_factors.fn)
_int4_pairs = gluon.jit(decode.int4_pairs.fn)
_int8_pairs = gluon.jit(decode.int8_pairs.fn)
_minus_zeros = gluon.jit(decode.minus_zeros.fn)
_mxfp4_pairs = gluon.jit(mxfp4_pairs.fn)
_nf4_pairs = gluon.jit(decode.nf4_pairs.fn)
_scaled_pairs = gluon.jit(scaled_pairs.fn)
_ROWS = gl.constexpr(128)  # of a program
_LINE = gl.constexpr(256)  # words, or scales, that are copied side by side
_TILE = gl.constexpr(TILE)
_WORDS = gl.constexpr(WORDS)
_MAX_ELEMENTS = 1 << 31  # that a descriptor's coordinates can name


@dataclass(frozen=True, slots=True)
class HopperConfig:
    """Launch config."""

    stages: int  # of the pipeline, a tile each
    registers: int  # of a thread on average; they decide the occupancy
    programs: int  # resident on an SM
    band: int  # blocks of pairs that follow each other before the next outputs


CONFIGS = {  # by tokens of a block
    8: HopperConfig(stages=4, registers=80, programs=3, band=1),
    16: HopperConfig(stages=4, registers=80, programs=3, band=1),
    32: HopperConfig(stages=4, registers=80, programs=3, band=1),
    64: HopperConfig(stages=4, registers=128, programs=2, band=4),
    128: HopperConfig(stages=2, registers=128, programs=2, band=4),
}


@gluon.jit
def _column(tiles, at, COLUMN: gl.constexpr, LAYOUT: gl.constexpr):
    """[32, 1] of a tile's rows."""
    return tiles.index(at).slice(COLUMN, 1, dim=1).load(LAYOUT)


@gluon.jit
def _wide(column, words):
    """The same for each word."""
    wide, _ = gl.broadcast(column, words)
    return wide


@gluon.jit
def _twice(scale):
    """bfloat16 in either half of 32 bits."""
    bits = scale.to(gl.bfloat16).to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
    return bits * 0x00010001


@gluon.jit
def _numbers(
    words, upper, s_tiles, z_tiles, at, J: gl.constexpr, KIND: gl.constexpr, SCALES: gl.constexpr,
    HAS_ZEROS: gl.constexpr, WORDS: gl.constexpr,
):  # fmt: skip
    """[32, 16] pairs: what the words' J-th stand for, with their groups' scales; fp4: 2^-19 times
    that."""
    if KIND == "fp4":
        word = gl.arange(0, _WORDS, layout=gl.SliceLayout(0, WORDS))[None, :]
        even = _wide(_column(s_tiles, at, 0, WORDS), words)
        odd = _wide(_column(s_tiles, at, 1, WORDS), words)
        scales = gl.where(_wide(word % 4 < 2, words), even, odd)
        pairs = _scaled_pairs(_mxfp4_pairs(words, J), _fp4_factors(scales, J), J)
    else:
        if KIND == "int4":
            zeros = gl.full([32, 1], 8, gl.int32, WORDS)
            if HAS_ZEROS:
                zeros = _column(z_tiles, at, J * SCALES // 4, WORDS).to(gl.int32)
            pairs = _int4_pairs(words, _wide(_minus_zeros(zeros), words), J)
        elif KIND == "int8":
            pairs = _int8_pairs(words, upper, J)
        elif KIND == "e4m3":
            pairs = _e4m3_pairs(words, upper, J)
        else:
            pairs = _nf4_pairs(words, J)
        if SCALES > 0:
            factor = _twice(_column(s_tiles, at, J * SCALES // 4, WORDS))
            pairs = _scaled_pairs(pairs, _wide(factor, pairs), 0)
    return pairs


@gluon.jit
def _words(w_tiles, at, PLANES: gl.constexpr, WORDS: gl.constexpr):
    """(lower plane, upper plane)"""
    tile = w_tiles.index(at)
    if PLANES == 1:
        lower = tile.load(WORDS)
        upper = lower
    else:
        lower = tile.slice(0, _WORDS, dim=1).load(WORDS)
        upper = tile.slice(_WORDS, _WORDS, dim=1).load(WORDS)
    return lower, upper


@gluon.jit
def _left(
    words0, upper0, words1, upper1, s_tiles, z_tiles, at, PANEL: gl.constexpr, KIND: gl.constexpr,
    SCALES: gl.constexpr, HAS_ZEROS: gl.constexpr, WORDS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """[64, 64]: a slab's numbers of the first or second half of a tile's inputs."""
    J: gl.constexpr = 2 * PANEL
    a = _numbers(words0, upper0, s_tiles, z_tiles, at, J, KIND, SCALES, HAS_ZEROS, WORDS)
    b = _numbers(words0, upper0, s_tiles, z_tiles, at, J + 1, KIND, SCALES, HAS_ZEROS, WORDS)
    c = _numbers(words1, upper1, s_tiles, z_tiles, at + 1, J, KIND, SCALES, HAS_ZEROS, WORDS)
    d = _numbers(words1, upper1, s_tiles, z_tiles, at + 1, J + 1, KIND, SCALES, HAS_ZEROS, WORDS)
    return slab_of_pairs(a, b, c, d, LAYOUT)


@gluon.jit
def _multiply_slab(
    acc, w_tiles, s_tiles, z_tiles, x0, x1, at, KIND: gl.constexpr, PLANES: gl.constexpr,
    SCALES: gl.constexpr, HAS_ZEROS: gl.constexpr, WORDS: gl.constexpr, LEFT: gl.constexpr,
):  # fmt: skip
    """Two wgmma in flight, and what must live until they are done."""
    words0, upper0 = _words(w_tiles, at, PLANES, WORDS)
    words1, upper1 = _words(w_tiles, at + 1, PLANES, WORDS)
    a = _left(
        words0, upper0, words1, upper1, s_tiles, z_tiles, at, 0, KIND, SCALES, HAS_ZEROS, WORDS,
        LEFT,
    )  # fmt: skip
    acc = warpgroup_mma(a, x0, acc, is_async=True)
    b = _left(
        words0, upper0, words1, upper1, s_tiles, z_tiles, at, 1, KIND, SCALES, HAS_ZEROS, WORDS,
        LEFT,
    )  # fmt: skip
    acc = warpgroup_mma(b, x1, acc, is_async=True)
    return acc, a, b


@gluon.jit
def _finish(
    acc, row_scales_ptr, outer_ptr, bias_ptr, out_ptr, pairs_ptr, weights_ptr, first, block, split,
    num_tokens, num_out, out_features,
    KIND: gl.constexpr, HAS_ROW_SCALES: gl.constexpr, HAS_OUTER: gl.constexpr,
    HAS_BIAS: gl.constexpr, BLOCKS: gl.constexpr, IS_WEIGHTED: gl.constexpr, M: gl.constexpr,
):  # fmt: skip
    """Writes the 64 outputs from `first`. Of a warp's 16 rows the second eight are those of the
    slab's second half. Pairs with their weight go where they belong, others in order of blocks."""
    MMA: gl.constexpr = acc.type.layout
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, MMA))
    outputs = first + row // 8 % 2 * 32 + row // 16 * 8 + row % 8
    is_output = outputs < out_features
    within = gl.arange(0, M, layout=gl.SliceLayout(0, MMA))
    to_rows = block * M + within
    tokens = to_rows
    if BLOCKS == "of a slot":
        tokens = gl.load(pairs_ptr + to_rows)
        if IS_WEIGHTED:
            to_rows = tokens
    elif BLOCKS == "of a pair":
        tokens = gl.where(within == 0, block, num_tokens)
        to_rows = tokens
    is_token = tokens < num_tokens
    if KIND == "fp4":
        acc *= 524288.0
    if HAS_ROW_SCALES:
        scale = gl.load(row_scales_ptr + outputs, mask=is_output, other=0.0)
        acc *= scale.to(gl.float32)[:, None]
    if HAS_OUTER:
        acc *= gl.load(outer_ptr + outputs, mask=is_output, other=0.0)[:, None]
    if HAS_BIAS:
        bias = gl.load(bias_ptr + outputs, mask=is_output & (split == 0), other=0.0)
        acc += bias.to(gl.float32)[:, None]
    if IS_WEIGHTED:
        acc *= gl.load(weights_ptr + tokens, mask=is_token, other=0.0)[None, :]
    to = (split * num_out + to_rows).to(gl.int64)[None, :] * out_features + outputs[:, None]
    mask = is_output[:, None] & is_token[None, :]
    gl.store(out_ptr + to, acc.to(out_ptr.dtype.element_ty), mask=mask)


@gluon.jit
def _compute(
    w_tiles, s_tiles, z_tiles, x_panels, full, empty, row_scales_ptr, outer_ptr, bias_ptr, out_ptr,
    pairs_ptr, weights_ptr, first, block, split, num_here, num_tokens, num_out, out_features,
    KIND: gl.constexpr, PLANES: gl.constexpr, SCALES: gl.constexpr, HAS_ZEROS: gl.constexpr,
    HAS_ROW_SCALES: gl.constexpr, HAS_OUTER: gl.constexpr, HAS_BIAS: gl.constexpr,
    BLOCKS: gl.constexpr, IS_WEIGHTED: gl.constexpr, M: gl.constexpr, STAGES: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    WORDS: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    acc0, acc1 = gl.zeros([64, M], gl.float32, MMA), gl.zeros([64, M], gl.float32, MMA)
    for j in range(num_here):
        stage = j % STAGES
        mbarrier.wait(full.index(stage), (j // STAGES) & 1)
        x0 = x_panels.index(stage * 2).permute((1, 0))
        x1 = x_panels.index(stage * 2 + 1).permute((1, 0))
        acc0, a, b = _multiply_slab(
            acc0, w_tiles, s_tiles, z_tiles, x0, x1, stage * 4, KIND, PLANES, SCALES, HAS_ZEROS,
            WORDS, LEFT,
        )  # fmt: skip
        acc1, c, d = _multiply_slab(
            acc1, w_tiles, s_tiles, z_tiles, x0, x1, stage * 4 + 2, KIND, PLANES, SCALES, HAS_ZEROS,
            WORDS, LEFT,
        )  # fmt: skip
        acc0, acc1, a, b, c, d = warpgroup_mma_wait(0, deps=(acc0, acc1, a, b, c, d))
        mbarrier.arrive(empty.index(stage), count=1)
    if PDL:
        gdc_wait()  # the producer warp has waited, so this takes no time
    _finish(
        acc0, row_scales_ptr, outer_ptr, bias_ptr, out_ptr, pairs_ptr, weights_ptr, first, block,
        split, num_tokens, num_out, out_features, KIND, HAS_ROW_SCALES, HAS_OUTER, HAS_BIAS, BLOCKS,
        IS_WEIGHTED, M,
    )  # fmt: skip
    _finish(
        acc1, row_scales_ptr, outer_ptr, bias_ptr, out_ptr, pairs_ptr, weights_ptr, first + 64,
        block, split, num_tokens, num_out, out_features, KIND, HAS_ROW_SCALES, HAS_OUTER, HAS_BIAS,
        BLOCKS, IS_WEIGHTED, M,
    )  # fmt: skip


@gluon.jit
def _copy_columns(desc, boxes, barrier, stage, row, COLUMNS: gl.constexpr):
    """So many numbers of each of a program's rows."""
    NUM: gl.constexpr = (_ROWS * COLUMNS + _LINE - 1) // _LINE
    for i in gl.static_range(NUM):
        copy(desc, [row * COLUMNS + i * _LINE], barrier, boxes.index(stage * NUM + i))


@gluon.jit
def _copy_weights(
    w_desc, s_desc, z_desc, w_boxes, s_boxes, z_boxes, full, stage, tile, first_row,
    first_scale_row, out_features, tiles_per_scale,
    PLANES: gl.constexpr, SCALES: gl.constexpr, HAS_ZEROS: gl.constexpr, BYTES: gl.constexpr,
):  # fmt: skip
    """A tile's words, scales and zero points; BYTES are those of its inputs, too."""
    LINE_ROWS: gl.constexpr = _LINE // (_WORDS * PLANES)
    row = first_row + tile * out_features
    scale_row = first_scale_row + tile // tiles_per_scale * out_features
    barrier = full.index(stage)
    mbarrier.expect(barrier, BYTES)
    copy(w_desc, [row // LINE_ROWS, 0], barrier, w_boxes.index(stage))
    if SCALES > 0:
        _copy_columns(s_desc, s_boxes, barrier, stage, scale_row, SCALES)
    if HAS_ZEROS:
        _copy_columns(z_desc, z_boxes, barrier, stage, scale_row, SCALES)


@gluon.jit
def _load(
    w_desc, s_desc, z_desc, x_desc, w_boxes, s_boxes, z_boxes, x_panels, full, empty, first_row,
    first_scale_row, x_row, first_tile, num_here, out_features, tiles_per_scale,
    PLANES: gl.constexpr, SCALES: gl.constexpr, SCALE_BYTES: gl.constexpr, HAS_ZEROS: gl.constexpr,
    M: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    COLUMN_BYTES: gl.constexpr = SCALES * (SCALE_BYTES + (1 if HAS_ZEROS else 0))
    BYTES: gl.constexpr = _ROWS * (4 * _WORDS * PLANES + COLUMN_BYTES) + 2 * M * _TILE
    num_early = gl.minimum(num_here, STAGES)
    for j in range(num_early):
        _copy_weights(
            w_desc, s_desc, z_desc, w_boxes, s_boxes, z_boxes, full, j, first_tile + j, first_row,
            first_scale_row, out_features, tiles_per_scale, PLANES, SCALES, HAS_ZEROS, BYTES,
        )  # fmt: skip
    if PDL:
        gdc_wait()
    for j in range(num_early):
        copy_panels(x_desc, x_panels, full, j, x_row, first_tile + j)
    for j in range(num_early, num_here):
        stage, tile = j % STAGES, first_tile + j
        mbarrier.wait(empty.index(stage), ((j // STAGES) & 1) ^ 1)
        _copy_weights(
            w_desc, s_desc, z_desc, w_boxes, s_boxes, z_boxes, full, stage, tile, first_row,
            first_scale_row, out_features, tiles_per_scale, PLANES, SCALES, HAS_ZEROS, BYTES,
        )  # fmt: skip
        copy_panels(x_desc, x_panels, full, stage, x_row, tile)


@gluon.jit
def _columns(DTYPE: gl.constexpr, BITS: gl.constexpr, STAGES: gl.constexpr, COLUMNS: gl.constexpr):
    """The same memory twice: boxes as they are copied, and tiles of 32 rows as they are read."""
    NUM: gl.constexpr = (_ROWS * COLUMNS + _LINE - 1) // _LINE
    BOX: gl.constexpr = _ROWS * COLUMNS // NUM
    LINEAR: gl.constexpr = gl.NVMMASharedLayout(0, BITS, rank=1)
    boxes = gl.allocate_shared_memory(DTYPE, [STAGES * NUM, BOX], LINEAR)
    ROWS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    return boxes, view(boxes, DTYPE, [STAGES * 4, 32, COLUMNS], ROWS)


@gluon.jit
def _run(
    w_desc, s_desc, z_desc, x_desc, row_scales_ptr, outer_ptr, bias_ptr, out_ptr, pairs_ptr,
    weights_ptr, slot, first, block, split, x_row, num_tokens, num_out, out_features, num_tiles,
    tiles_each, num_scales, tiles_per_scale,
    KIND: gl.constexpr, PLANES: gl.constexpr, SCALES: gl.constexpr, HAS_ZEROS: gl.constexpr,
    HAS_ROW_SCALES: gl.constexpr, HAS_OUTER: gl.constexpr, HAS_BIAS: gl.constexpr,
    BLOCKS: gl.constexpr, IS_WEIGHTED: gl.constexpr, M: gl.constexpr, STAGES: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """A program's outputs, tokens and inputs, with the matrix of a slot."""
    first_tile = split * tiles_each
    num_here = gl.minimum(tiles_each, num_tiles - first_tile)
    if BLOCKS != "of tokens":
        row_scales_ptr += slot * out_features
        outer_ptr += slot * out_features
        bias_ptr += slot * out_features
    W: gl.constexpr = gl.NVMMASharedLayout(0, 32)
    X: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    LINES: gl.constexpr = _ROWS * _WORDS * PLANES // _LINE
    w_boxes = gl.allocate_shared_memory(gl.int32, [STAGES, LINES, _LINE], W)
    ROWS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    w_tiles = view(w_boxes, gl.int32, [STAGES * 4, 32, _WORDS * PLANES], ROWS)
    x_panels = gl.allocate_shared_memory(gl.bfloat16, [STAGES * 2, M, PANEL], X)
    s_boxes, s_tiles = w_boxes, w_tiles
    z_boxes, z_tiles = w_boxes, w_tiles
    SCALE_BITS: gl.constexpr = s_desc.dtype.primitive_bitwidth if SCALES > 0 else 0
    if SCALES > 0:
        s_boxes, s_tiles = _columns(s_desc.dtype, SCALE_BITS, STAGES, SCALES)
    if HAS_ZEROS:
        z_boxes, z_tiles = _columns(gl.uint8, 8, STAGES, SCALES)
    full, empty = pipeline_barriers(STAGES)
    first_row, first_scale_row = slot * num_tiles * out_features, slot * num_scales * out_features
    gl.warp_specialize(
        [
            (_compute, (
                w_tiles, s_tiles, z_tiles, x_panels, full, empty, row_scales_ptr, outer_ptr,
                bias_ptr, out_ptr, pairs_ptr, weights_ptr, first, block, split, num_here,
                num_tokens, num_out, out_features, KIND, PLANES, SCALES, HAS_ZEROS, HAS_ROW_SCALES,
                HAS_OUTER, HAS_BIAS, BLOCKS, IS_WEIGHTED, M, STAGES, PDL,
            )),
            (_load, (
                w_desc, s_desc, z_desc, x_desc, w_boxes, s_boxes, z_boxes, x_panels, full, empty,
                first_row + first, first_scale_row + first, x_row, first_tile, num_here,
                out_features, tiles_per_scale, PLANES, SCALES, SCALE_BITS // 8, HAS_ZEROS, M,
                STAGES, PDL,
            )),
        ],
        [1],
        [24],
    )  # fmt: skip


@gluon_jit(do_not_specialize=["num_tokens", "num_blocks", "num_out", "tiles_each", "band"])
def _wna16(
    w_desc, s_desc, z_desc, x_desc, row_scales_ptr, outer_ptr, bias_ptr, out_ptr, slots_ptr,
    pairs_ptr, weights_ptr, num_tokens, num_blocks, num_out, out_features, num_tiles, tiles_each,
    num_scales, tiles_per_scale, band, num_slots,
    KIND: gl.constexpr, PLANES: gl.constexpr, SCALES: gl.constexpr, HAS_ZEROS: gl.constexpr,
    HAS_ROW_SCALES: gl.constexpr, HAS_OUTER: gl.constexpr, HAS_BIAS: gl.constexpr,
    BLOCKS: gl.constexpr, PAIRS_PER_ROW: gl.constexpr, IS_WEIGHTED: gl.constexpr,
    IS_EARLY: gl.constexpr, M: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """As `wna16_triton._wna16`: out[split, t, o]. A band of blocks of tokens follow each other, so
    that they find the weights in the L2.

    IS_EARLY: slots were known before the previous kernel began, so weights need not wait for it.
    """
    if PDL:
        if not IS_EARLY:
            gdc_wait()
        gdc_launch_dependents()
    num_rows = gl.cdiv(out_features, _ROWS)
    split = gl.program_id(0) // (num_blocks * num_rows)
    at = gl.program_id(0) % (num_blocks * num_rows)
    first_block = at // (band * num_rows) * band
    height = gl.minimum(num_blocks - first_block, band)
    within = at % (band * num_rows)
    block, first = first_block + within % height, within // height * _ROWS
    if BLOCKS == "of tokens":
        _run(
            w_desc, s_desc, z_desc, x_desc, row_scales_ptr, outer_ptr, bias_ptr, out_ptr, pairs_ptr,
            weights_ptr, 0, first, block, split, block * M, num_tokens, num_out, out_features,
            num_tiles, tiles_each, num_scales, tiles_per_scale, KIND, PLANES, SCALES, HAS_ZEROS,
            HAS_ROW_SCALES, HAS_OUTER, HAS_BIAS, BLOCKS, IS_WEIGHTED, M, STAGES, PDL,
        )  # fmt: skip
    else:
        slot = gl.load(slots_ptr + block, cache_modifier=".cg")
        x_row = block * M
        if BLOCKS == "of a pair":
            x_row = block // PAIRS_PER_ROW
        if slot < num_slots:
            _run(
                w_desc, s_desc, z_desc, x_desc, row_scales_ptr, outer_ptr, bias_ptr, out_ptr,
                pairs_ptr, weights_ptr, slot, first, block, split, x_row, num_tokens, num_out,
                out_features, num_tiles, tiles_each, num_scales, tiles_per_scale, KIND, PLANES,
                SCALES, HAS_ZEROS, HAS_ROW_SCALES, HAS_OUTER, HAS_BIAS, BLOCKS, IS_WEIGHTED, M,
                STAGES, PDL,
            )  # fmt: skip
        elif PDL:
            gdc_wait()


def can_read(x: Tensor, weight: GpuPackedWeight) -> bool:
    return (
        x.dtype == torch.bfloat16
        and weight.in_features % 8 == 0
        and weight.out_features % WORDS == 0
        and max(weight.words_NOPW.numel() // WORDS, weight.scales.numel()) < _MAX_ELEMENTS
    )


def fits(x_TI: Tensor, weight: GpuPackedWeight) -> bool:
    """Whether the kernel can compute these, on a Hopper GPU."""
    return can_read(x_TI, weight) and weight.words_NOPW.dim() == 4


def multiply(
    x: Tensor,
    weight: GpuPackedWeight,
    bias: Tensor | None,
    num_tokens: int,
    rows: int,
    c: HopperConfig,
    splits: int,
    *,
    slots_B: Tensor | None = None,
    pairs_BM: Tensor | None = None,
    weights_P: Tensor | None = None,
    is_early: bool = True,
) -> Tensor:
    """[splits, tokens, outputs].

    With `slots_B` tokens are pairs, one to a block or `pairs_BM`. Then `x` is in the order of
    blocks, and so is what comes out, but with `weights_P`.
    """
    num_tiles, out_features, planes, _ = weight.words_NOPW.shape[-4:]
    stages = max(2, c.stages + 1 - planes)  # words of twice the size, the same occupancy
    num_groups, _, columns = weight.scales.shape[-3:]
    has_row_scales = num_groups == 1 < num_tiles and weight.zeros is None
    num_blocks = cdiv(num_tokens, rows) if slots_B is None else len(slots_B)
    num_rows = cdiv(out_features, _ROWS.value)
    tiles_each = cdiv(num_tiles, splits)
    splits = cdiv(num_tiles, tiles_each)
    num_out = num_tokens if pairs_BM is None or weights_P is not None else pairs_BM.numel()
    dtype = x.dtype if splits == 1 else torch.float32
    out = torch.empty((splits, num_out, out_features), dtype=dtype, device=x.device)
    blocks = "of tokens"
    if slots_B is not None:
        blocks = "of a pair" if pairs_BM is None else "of a slot"
    line = _LINE.value
    words = (weight.words_NOPW.numel() // line, line)
    box = (_ROWS.value * WORDS * planes // line, line)
    w_desc = descriptor(weight.words_NOPW, words, box, gl.NVMMASharedLayout(0, 32))
    x_shape, x_box = (x.shape[0], x.shape[1]), (rows, PANEL.value)
    x_desc = descriptor(x, x_shape, x_box, gl.NVMMASharedLayout(128, 16))
    s_desc, z_desc = (
        None if part is None else _column_descriptor(part)
        for part in (None if has_row_scales else weight.scales, weight.zeros)
    )
    _wna16[(num_blocks * num_rows * splits,)](
        w_desc, s_desc or x_desc, z_desc or x_desc, x_desc, weight.scales,
        pointer(weight.outer_O, out), pointer(bias, out), out, pointer(slots_B, out),
        pointer(pairs_BM, out), pointer(weights_P, out), num_tokens, num_blocks, num_out,
        out_features, num_tiles, tiles_each, num_groups, cdiv(num_tiles, num_groups),
        num_blocks if slots_B is None else c.band, weight.num_slots,
        KIND=weight.kind, PLANES=planes, SCALES=0 if has_row_scales else columns,
        HAS_ZEROS=weight.zeros is not None, HAS_ROW_SCALES=has_row_scales,
        HAS_OUTER=weight.outer_O is not None, HAS_BIAS=bias is not None, BLOCKS=blocks,
        PAIRS_PER_ROW=num_tokens // x.shape[0] if blocks == "of a pair" else 1,
        IS_WEIGHTED=weights_P is not None, IS_EARLY=is_early, M=rows,
        STAGES=stages, num_warps=4, maxnreg=c.registers, **launch_options(x),
    )  # fmt: skip
    return out


def linear(
    x_TI: Tensor,
    weight: GpuPackedWeight,
    bias_O: Tensor | None,
    rows: int | None = None,
    config: HopperConfig | None = None,
    splits: int | None = None,
) -> Tensor:
    """As `weight_only_linear`, of what `fits`."""
    num_tokens = x_TI.shape[0]
    x_TI = x_TI.contiguous() if weight.order_I is None else x_TI[:, weight.order_I]
    rows = rows or min(max(CONFIGS), max(min(CONFIGS), next_power_of_2(num_tokens)))
    c = config or CONFIGS[rows]
    if splits is None:
        # So there are few kernels to compile at start.
        num_blocks = next_power_of_2(cdiv(num_tokens, rows))
        splits = choose_splits(num_blocks, weight, c)
    parts = multiply(x_TI, weight, bias_O, num_tokens, rows, c, splits)
    return parts[0] if len(parts) == 1 else combine(parts, num_tokens, x_TI.dtype)


def choose_splits(num_blocks: int, weight: GpuPackedWeight, c: HopperConfig) -> int:
    num_programs = num_blocks * cdiv(weight.out_features, _ROWS.value)
    return choose_split_k(num_programs, c.programs * num_sms(), weight.num_tiles)


def _column_descriptor(columns: Tensor) -> object:
    size = min(_LINE.value, _ROWS.value * columns.shape[-1])
    layout = gl.NVMMASharedLayout(0, 8 * columns.itemsize, rank=1)
    return descriptor(columns, (columns.numel(),), (size,), layout)
