"""Grouped GEMM of MXFP4 experts on Hopper, warp-specialized, for sorted pairs.

A producer warp copies words, scales and inputs into shared memory by TMA, a tile of 128 inputs at a
time; four consumer warps dequantize codes to bfloat16 in registers and multiply them there (wgmma).
A program has two slabs of 64 rows of a block's expert. The first and second 32 rows of a slab lie
`apart` rows from each other in the matrix: with a gate they are the gate's and those that it
multiplies, so that a thread has what belongs together.

The result is that of `mxfp4_triton`, up to rounding. Triton's interpreter cannot run this:
tests/gpu compares it.

Legend: T tokens, S slots, K experts of a token, P = T * K pairs, B blocks of pairs, M pairs of a
block, D inputs, N outputs.
"""

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from penstock.kernels.gemm.fp4_dequantize import factors_of, mxfp4_pairs, scaled_pairs
from penstock.kernels.gemm.reduce import combine
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
from penstock.kernels.launch import jit
from penstock.kernels.moe.align import rows_per_block, sorted_pairs
from penstock.kernels.moe.gate import Gate
from penstock.kernels.moe.hopper_config import HopperConfig
from penstock.kernels.moe.weights import TILE, ExpertWeights
from penstock.kernels.pdl import launch_options, let_next_start, wait_for_previous
from penstock.kernels.sizes import cdiv, next_power_of_2
from penstock.kernels.triton_math import gate_of, in_bands

_gate_of = gluon.jit(gate_of.fn)
_in_bands = gluon.jit(in_bands.fn)
_pairs = gluon.jit(mxfp4_pairs.fn)
_factors_of = gluon.jit(factors_of.fn)
_scaled_pairs = gluon.jit(scaled_pairs.fn)
_HALF = gl.constexpr(32)  # rows of half a slab
_LINE = gl.constexpr(256)  # words that lie side by side in a box
_LINE_ROWS = gl.constexpr(16)  # whose words they are
_TILE = gl.constexpr(TILE)


# By pairs of a block. us of both GEMMs, H200, gpt-oss-120b (roofline): 32 tokens 291 (249), 256
# tokens 468 (374), 1024 tokens 766, 8192 tokens 3114. Instructions decide: 296 for a warp's tile,
# not 343, were 10 %.
CONFIGS = {
    8: HopperConfig(stages=4, band=1, registers=64),
    16: HopperConfig(stages=4, band=1, registers=80),
    32: HopperConfig(stages=4, band=1, registers=80),
    64: HopperConfig(stages=4, band=4, registers=128),
    128: HopperConfig(stages=2, band=4, registers=128),
}


@gluon.jit
def _numbers(words, powers, J: gl.constexpr):
    """[32, 16] pairs: 2^-32 times the values of the J-th group of inputs."""
    factors, pairs = gl.broadcast(_factors_of(powers, J)[:, None], _pairs(words, J))
    return _scaled_pairs(pairs, factors, J)


@gluon.jit
def _left(words0, words1, powers0, powers1, PANEL: gl.constexpr, LAYOUT: gl.constexpr):
    """[64, 64]: a slab's numbers of the first or second half of a tile's inputs."""
    J: gl.constexpr = 2 * PANEL
    a, b = _numbers(words0, powers0, J), _numbers(words0, powers0, J + 1)
    c, d = _numbers(words1, powers1, J), _numbers(words1, powers1, J + 1)
    return slab_of_pairs(a, b, c, d, LAYOUT)


@gluon.jit
def _multiply_slab(acc, w_tiles, p_tiles, x0, x1, at, LEFT: gl.constexpr, WORDS: gl.constexpr):
    """Two wgmma in flight, and what must live until they are done."""
    POWERS: gl.constexpr = gl.SliceLayout(1, WORDS)
    words0, words1 = w_tiles.index(at).load(WORDS), w_tiles.index(at + 2).load(WORDS)
    powers0, powers1 = p_tiles.index(at).load(POWERS), p_tiles.index(at + 2).load(POWERS)
    a = _left(words0, words1, powers0, powers1, 0, LEFT)
    acc = warpgroup_mma(a, x0, acc, is_async=True)
    b = _left(words0, words1, powers0, powers1, 1, LEFT)
    acc = warpgroup_mma(b, x1, acc, is_async=True)
    return acc, a, b


@gluon.jit
def _finish(
    acc, bias_ptr, weights_ptr, y_ptr, pairs_ptr, slot, block, first, apart, num_pairs, N,
    alpha, shift, limit, IS_GATED: gl.constexpr, M: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """Writes a slab: with a gate the 32 outputs from `first` in the order of blocks, else those
    from `first` and from `first + apart` of each pair, times its weight."""
    parts = (acc * 4294967296.0).reshape([4, 2, 8, M]).permute([0, 2, 3, 1])
    low, high = gl.split(parts.reshape([_HALF, M, 2]))
    LAYOUT: gl.constexpr = low.type.layout
    outputs = first + gl.arange(0, _HALF, layout=gl.SliceLayout(1, LAYOUT))
    places = gl.arange(0, M, layout=gl.SliceLayout(0, LAYOUT))
    pairs = gl.load(pairs_ptr + block * M + places)
    is_pair = pairs < num_pairs
    num_rows = 2 * N if IS_GATED else N
    is_low = outputs < N
    is_high = outputs + apart < num_rows
    if HAS_BIAS:
        bias_ptr += slot * num_rows + outputs
        low += gl.load(bias_ptr, mask=is_low, other=0.0).to(gl.float32)[:, None]
        high += gl.load(bias_ptr + apart, mask=is_high, other=0.0).to(gl.float32)[:, None]
    if IS_GATED:
        y = _gate_of(low, high, alpha, shift, limit).to(y_ptr.dtype.element_ty)
        to = (block * M + places).to(gl.int64)[None, :] * N + outputs[:, None]
        gl.store(y_ptr + to, y, mask=is_low[:, None] & is_pair[None, :])
    else:
        weights = gl.load(weights_ptr + pairs, mask=is_pair, other=0.0)[None, :]
        low, high = (low * weights).to(y_ptr.dtype.element_ty), high * weights
        to = pairs.to(gl.int64)[None, :] * N + outputs[:, None]
        gl.store(y_ptr + to, low, mask=is_low[:, None] & is_pair[None, :])
        high = high.to(y_ptr.dtype.element_ty)
        gl.store(y_ptr + to + apart, high, mask=is_high[:, None] & is_pair[None, :])


@gluon.jit
def _compute(
    w_tiles, p_tiles, x_panels, full, empty, bias_ptr, weights_ptr, y_ptr, pairs_ptr, slot, block,
    first, apart, num_tiles, num_pairs, N, alpha, shift, limit,
    IS_GATED: gl.constexpr, M: gl.constexpr, STAGES: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    WORDS: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    acc0, acc1 = gl.zeros([64, M], gl.float32, MMA), gl.zeros([64, M], gl.float32, MMA)
    for j in range(num_tiles):
        stage = j % STAGES
        mbarrier.wait(full.index(stage), (j // STAGES) & 1)
        x0 = x_panels.index(stage * 2).permute((1, 0))
        x1 = x_panels.index(stage * 2 + 1).permute((1, 0))
        acc0, a, b = _multiply_slab(acc0, w_tiles, p_tiles, x0, x1, stage * 4, LEFT, WORDS)
        acc1, c, d = _multiply_slab(acc1, w_tiles, p_tiles, x0, x1, stage * 4 + 1, LEFT, WORDS)
        acc0, acc1, a, b, c, d = warpgroup_mma_wait(0, deps=(acc0, acc1, a, b, c, d))
        mbarrier.arrive(empty.index(stage), count=1)
    _finish(
        acc0, bias_ptr, weights_ptr, y_ptr, pairs_ptr, slot, block, first, apart, num_pairs, N,
        alpha, shift, limit, IS_GATED, M, HAS_BIAS,
    )  # fmt: skip
    _finish(
        acc1, bias_ptr, weights_ptr, y_ptr, pairs_ptr, slot, block, first + _HALF, apart, num_pairs,
        N, alpha, shift, limit, IS_GATED, M, HAS_BIAS,
    )  # fmt: skip


@gluon.jit
def _load(
    w_desc, p_desc, x_desc, w_boxes, p_boxes, x_panels, full, empty, first_row, apart, num_rows,
    x_row, num_tiles, M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Both slabs' rows of a tile, in two boxes: those from `first_row` and those `apart` behind."""
    BYTES: gl.constexpr = 4 * _HALF * (4 * 16 + 4) + 2 * M * _TILE
    for j in range(num_tiles):
        stage = j % STAGES
        mbarrier.wait(empty.index(stage), ((j // STAGES) & 1) ^ 1)
        barrier = full.index(stage)
        mbarrier.expect(barrier, BYTES)
        for half in gl.static_range(2):
            row = first_row + j * num_rows + half * apart
            copy(w_desc, [row // _LINE_ROWS, 0], barrier, w_boxes.index(stage * 2 + half))
            copy(p_desc, [row], barrier, p_boxes.index(stage * 2 + half))
        copy_panels(x_desc, x_panels, full, stage, x_row, j)


@gluon_jit(do_not_specialize=["num_pairs", "num_blocks"])
def _mxfp4(
    w_desc, p_desc, x_desc, bias_ptr, weights_ptr, y_ptr, slots_ptr, pairs_ptr, num_pairs,
    num_blocks, S, N, num_rows, num_tiles, alpha, shift, limit,
    IS_GATED: gl.constexpr, M: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr,
    HAS_BIAS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """As `mxfp4_triton._mxfp4` of sorted pairs, with inputs in the order of blocks; num_rows is of
    a slot's matrix. Gated outputs are in that order, too, others in the order of pairs."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    OUTPUTS: gl.constexpr = 2 * _HALF if IS_GATED else 4 * _HALF
    num_n = gl.cdiv(N, OUTPUTS)
    block, column = _in_bands(gl.program_id(0), num_blocks, num_n, BAND)
    first = column * OUTPUTS
    slot = gl.load(slots_ptr + block)
    if slot < S:
        W: gl.constexpr = gl.NVMMASharedLayout(0, 32)
        P: gl.constexpr = gl.NVMMASharedLayout(0, 32, rank=1)
        X: gl.constexpr = gl.NVMMASharedLayout(128, 16)
        # The same memory: boxes as they are copied, and tiles of 32 rows as they are read.
        w_boxes = gl.allocate_shared_memory(gl.int32, [STAGES * 2, 4, _LINE], W)
        p_boxes = gl.allocate_shared_memory(gl.int32, [STAGES * 2, 2 * _HALF], P)
        ROWS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        ROW: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        w_tiles = view(w_boxes, gl.int32, [STAGES * 4, _HALF, 16], ROWS)
        p_tiles = view(p_boxes, gl.int32, [STAGES * 4, _HALF], ROW)
        x_panels = gl.allocate_shared_memory(gl.bfloat16, [STAGES * 2, M, PANEL], X)
        full, empty = pipeline_barriers(STAGES)
        apart = N if IS_GATED else 2 * _HALF
        first_row = slot * (num_tiles * num_rows) + first
        gl.warp_specialize(
            [
                (_compute, (
                    w_tiles, p_tiles, x_panels, full, empty, bias_ptr, weights_ptr, y_ptr,
                    pairs_ptr, slot.to(gl.int64), block, first, apart, num_tiles, num_pairs, N,
                    alpha, shift, limit, IS_GATED, M, STAGES, HAS_BIAS,
                )),
                (_load, (
                    w_desc, p_desc, x_desc, w_boxes, p_boxes, x_panels, full, empty, first_row,
                    apart, num_rows, block * M, num_tiles, M, STAGES,
                )),
            ],
            [1],
            [24],
        )  # fmt: skip


@jit(do_not_specialize=["num_pairs"])
def _gather(
    x_ptr, pairs_ptr, y_ptr, num_pairs, stride_x, D,
    K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y[place] = x[token of the pair at that place]; what has no pair is left as it is."""
    wait_for_previous(PDL)
    let_next_start(PDL)
    place = tl.program_id(0).to(tl.int64)
    pair = tl.load(pairs_ptr + place)
    if pair < num_pairs:
        channels = tl.arange(0, BLOCK)
        x = tl.load(x_ptr + (pair // K).to(tl.int64) * stride_x + channels, mask=channels < D)
        tl.store(y_ptr + place * D + channels, x, mask=channels < D)


def in_order_of_blocks(x_TD: Tensor, pairs_BM: Tensor, num_pairs: int) -> Tensor:
    """The inputs in the order of blocks."""
    num_tokens, size = x_TD.shape
    out = torch.empty((pairs_BM.numel(), size), dtype=x_TD.dtype, device=x_TD.device)
    _gather[(pairs_BM.numel(),)](
        x_TD, pairs_BM, out, num_pairs, x_TD.stride(0), size, K=num_pairs // num_tokens,
        BLOCK=next_power_of_2(size), num_warps=4, **launch_options(x_TD),
    )  # fmt: skip
    return out


def _multiply(
    x: Tensor,
    weights: ExpertWeights,
    bias_SN: Tensor | None,
    weights_TK: Tensor,
    slots_B: Tensor,
    pairs_BM: Tensor,
    c: HopperConfig,
    gate: Gate | None = None,
) -> Tensor:
    """With a gate [B * M, N], else [P, N] weighted; `x` is in the order of blocks."""
    assert weights.scale is not None
    num_slots, num_tiles, num_rows, _ = weights.values.shape
    num_blocks, rows = pairs_BM.shape
    num_pairs, out_features = weights_TK.numel(), num_rows // (1 if gate is None else 2)
    num_out = num_pairs if gate is None else x.shape[0]
    out = torch.empty((num_out, out_features), dtype=x.dtype, device=x.device)
    all_rows = num_slots * num_tiles * num_rows
    lines = (all_rows // _LINE_ROWS.value, _LINE.value)
    half = 2 * _HALF.value
    w_desc = descriptor(weights.values, lines, (4, _LINE.value), gl.NVMMASharedLayout(0, 32))
    p_layout = gl.NVMMASharedLayout(0, 32, rank=1)
    p_desc = descriptor(weights.scale, (all_rows,), (half,), p_layout)
    x_shape, x_box = (x.shape[0], x.shape[1]), (rows, PANEL.value)
    x_desc = descriptor(x, x_shape, x_box, gl.NVMMASharedLayout(128, 16))
    alpha, shift, limit = (gate.alpha, gate.shift, gate.limit) if gate else (0.0, 0.0, 0.0)
    _mxfp4[(cdiv(out_features, 2 * half if gate is None else half) * num_blocks,)](
        w_desc, p_desc, x_desc, weights_TK if bias_SN is None else bias_SN, weights_TK, out,
        slots_B, pairs_BM, num_pairs, num_blocks, num_slots, out_features, num_rows, num_tiles,
        alpha, shift, limit,
        IS_GATED=gate is not None, M=rows, STAGES=c.stages, BAND=c.band,
        HAS_BIAS=bias_SN is not None, num_warps=4, maxnreg=c.registers, **launch_options(x),
    )  # fmt: skip
    return out


def block_rows(num_pairs: int, num_slots: int) -> int:
    """Pairs of a block. With nearly as many for each expert many would have two blocks: one of 32
    takes 522 us where one of 16 takes 468."""
    if num_pairs <= 5 * num_slots:
        return 8
    if num_pairs <= 12 * num_slots:
        return 16
    return max(32, rows_per_block(num_pairs, num_slots, "mxfp4"))


def fits(x_TD: Tensor, gate_up: ExpertWeights, down: ExpertWeights) -> bool:
    """Whether the kernel can compute these, on a Hopper GPU."""
    return (
        x_TD.dtype == torch.bfloat16
        and gate_up.format == down.format == "mxfp4"
        and gate_up.out_features % (2 * _LINE_ROWS.value) == 0
        and down.out_features % _LINE_ROWS.value == 0
        and x_TD.shape[1] % 8 == 0
    )


def experts(
    x_TD: Tensor,
    slots_TK: Tensor,
    weights_TK: Tensor,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    gate_up_bias_S2F: Tensor | None,
    down_bias_SD: Tensor | None,
    gate: Gate,
    rows: int | None = None,
    config: HopperConfig | None = None,
) -> Tensor:
    """As `kernels.moe.experts`, of what `fits`."""
    assert slots_TK.is_contiguous() and weights_TK.is_contiguous()
    num_pairs, num_slots = slots_TK.numel(), down.num_slots
    rows = rows or block_rows(num_pairs, num_slots)
    c = config or CONFIGS[rows]
    pairs_BM, slots_B = sorted_pairs(slots_TK, num_slots, rows)
    shared = (weights_TK, slots_B, pairs_BM, c)
    h_sorted = _multiply(
        in_order_of_blocks(x_TD, pairs_BM, num_pairs), gate_up, gate_up_bias_S2F, *shared, gate
    )  # fmt: skip
    y_PD = _multiply(h_sorted, down, down_bias_SD, *shared)
    masked_by = None if down.has_all else slots_TK
    return combine(y_PD[None], x_TD.shape[0], x_TD.dtype, masked_by, num_slots)
