"""Grouped GEMM of FP8 experts with block scales on Hopper, warp-specialized, for sorted pairs.

A producer warp copies weights, inputs and the inputs' scales into shared memory by TMA, a tile of
128 inputs at a time: one block of scales. Four consumer warps multiply it (FP8 wgmma, weights on
the left) and accumulate the result, scaled, in fp32. A program has two slabs of 64 rows of a
block's expert, which lie `apart` rows from each other in the matrix: with a gate they are the
gate's rows and those that it multiplies.

The result is that of `grouped_gemm`, up to rounding. Triton's interpreter cannot run this:
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

from penstock.kernels.gemm.reduce import combine
from penstock.kernels.gluon_launch import jit as gluon_jit
from penstock.kernels.gluon_tools import copy, descriptor, pipeline_barriers, view
from penstock.kernels.launch import jit
from penstock.kernels.moe.align import sorted_pairs
from penstock.kernels.moe.gate import Gate
from penstock.kernels.moe.hopper_config import HopperConfig
from penstock.kernels.moe.weights import ExpertWeights
from penstock.kernels.pdl import launch_options, let_next_start, wait_for_previous
from penstock.kernels.quantize.fp8_triton import quantize_groups
from penstock.kernels.sizes import next_power_of_2
from penstock.kernels.triton_math import gate_of, in_bands

_gate_of = gluon.jit(gate_of.fn)
_in_bands = gluon.jit(in_bands.fn)
_TILE = gl.constexpr(128)  # inputs, and outputs, that share a scale
_SLAB = gl.constexpr(64)  # rows that one wgmma multiplies
_MIN_BOX = gl.constexpr(32)  # scales copied at once: TMA writes to multiples of 128 bytes
_LAYOUT = gl.NVMMASharedLayout(128, 8)
_SCALES_LAYOUT = gl.NVMMASharedLayout(0, 32, rank=1)


# By pairs of a block. us of both GEMMs, H200, DeepSeek-R1 (roofline; `grouped_gemm`): 32 tokens
# 1694 (1637; 1723), 256 2655 (2494; 2756), 1024 2929 (2494; 3371), 8192 10208 (4603; 12639).
CONFIGS = {
    8: HopperConfig(stages=4, band=1, registers=64),
    16: HopperConfig(stages=4, band=1, registers=80),
    32: HopperConfig(stages=4, band=1, registers=80),
    64: HopperConfig(stages=4, band=1, registers=112),
}
# Pipelines are filled anew by each program. With 512 inputs of the second GEMM (Qwen3-Next) that
# costs more than is won: 1024 tokens 551 us, by `grouped_gemm` 515. With 768 (Qwen3-30B) large
# blocks make up for it: 1024 tokens 282 and 289, 8192 1344 and 1439.
_MIN_INPUTS = 1024
_FULL = 64  # pairs of an expert


@gluon.jit
def _finish(
    low, high, weights_ptr, y_ptr, pairs_ptr, block, first, num_pairs, N, alpha, shift, limit,
    IS_GATED: gl.constexpr, M: gl.constexpr,
):  # fmt: skip
    """Writes both slabs: with a gate the 64 outputs from `first` in the order of blocks, else the
    128 from `first` of each pair, times its weight."""
    LAYOUT: gl.constexpr = low.type.layout
    outputs = first + gl.arange(0, _SLAB, layout=gl.SliceLayout(1, LAYOUT))
    places = block * M + gl.arange(0, M, layout=gl.SliceLayout(0, LAYOUT))
    pairs = gl.load(pairs_ptr + places)
    is_pair = pairs < num_pairs
    if IS_GATED:
        y = _gate_of(low, high, alpha, shift, limit).to(y_ptr.dtype.element_ty)
        to = places.to(gl.int64)[None, :] * N + outputs[:, None]
        gl.store(y_ptr + to, y, mask=is_pair[None, :])
    else:
        weights = gl.load(weights_ptr + pairs, mask=is_pair, other=0.0)[None, :]
        to = pairs.to(gl.int64)[None, :] * N + outputs[:, None]
        gl.store(y_ptr + to, (low * weights).to(y_ptr.dtype.element_ty), mask=is_pair[None, :])
        high = (high * weights).to(y_ptr.dtype.element_ty)
        gl.store(y_ptr + to + _SLAB, high, mask=is_pair[None, :])


@gluon.jit
def _compute(
    w_tiles, x_tiles, s_tiles, full, empty, low_scales_ptr, high_scales_ptr, weights_ptr, y_ptr,
    pairs_ptr, block, first, num_tiles, num_pairs, N, alpha, shift, limit,
    IS_GATED: gl.constexpr, M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 32])
    none = gl.zeros([_SLAB, M], gl.float32, MMA)
    low, high = none, none
    low_scale, high_scale = gl.load(low_scales_ptr), gl.load(high_scales_ptr)
    for j in range(num_tiles):
        stage = j % STAGES
        mbarrier.wait(full.index(stage), (j // STAGES) & 1)
        x = x_tiles.index(stage).permute((1, 0))
        part = warpgroup_mma(w_tiles.index(2 * stage), x, none, use_acc=False, is_async=True)
        other = warpgroup_mma(w_tiles.index(2 * stage + 1), x, none, use_acc=False, is_async=True)
        scales = s_tiles.index(stage).slice(0, M).load(gl.SliceLayout(0, MMA))
        low_scales, high_scales = scales * low_scale, scales * high_scale
        following = gl.minimum(j + 1, num_tiles - 1)
        low_scale = gl.load(low_scales_ptr + following)
        high_scale = gl.load(high_scales_ptr + following)
        part, other = warpgroup_mma_wait(0, deps=(part, other))
        mbarrier.arrive(empty.index(stage), count=1)
        low += part * low_scales[None, :]
        high += other * high_scales[None, :]
    _finish(
        low, high, weights_ptr, y_ptr, pairs_ptr, block, first, num_pairs, N, alpha, shift, limit,
        IS_GATED, M,
    )  # fmt: skip


@gluon.jit
def _load(
    w_desc, x_desc, s_desc, w_tiles, x_tiles, s_boxes, full, empty, first_row, apart, x_row,
    num_padded, num_tiles, M: gl.constexpr, BOX: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    BYTES: gl.constexpr = (2 * _SLAB + M) * _TILE + 4 * BOX
    for j in range(num_tiles):
        stage = j % STAGES
        mbarrier.wait(empty.index(stage), ((j // STAGES) & 1) ^ 1)
        barrier = full.index(stage)
        mbarrier.expect(barrier, BYTES)
        for slab in gl.static_range(2):
            at = [first_row + slab * apart, j * _TILE]
            copy(w_desc, at, barrier, w_tiles.index(2 * stage + slab))
        copy(x_desc, [x_row, j * _TILE], barrier, x_tiles.index(stage))
        copy(s_desc, [j * num_padded + x_row], barrier, s_boxes.index(stage))


@gluon_jit(do_not_specialize=["num_pairs", "num_blocks"])
def _fp8_blocks(
    w_desc, x_desc, s_desc, w_scales_ptr, weights_ptr, y_ptr, slots_ptr, pairs_ptr, num_pairs,
    num_blocks, S, N, num_rows, num_tiles, alpha, shift, limit,
    IS_GATED: gl.constexpr, M: gl.constexpr, BOX: gl.constexpr, STAGES: gl.constexpr,
    BAND: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """As `grouped_gemm._grouped` with block scales, of inputs in the order of blocks; num_rows is
    of a slot's matrix. Gated outputs are in that order, too, others in the order of pairs."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    OUTPUTS: gl.constexpr = _SLAB if IS_GATED else 2 * _SLAB
    num_n = N // OUTPUTS
    block, column = _in_bands(gl.program_id(0), num_blocks, num_n, BAND)
    first = column * OUTPUTS
    slot = gl.load(slots_ptr + block)
    if slot < S:
        W: gl.constexpr = gl.NVMMASharedLayout(128, 8)
        FLAT: gl.constexpr = gl.NVMMASharedLayout(0, 32, rank=1)
        ROW: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        w_tiles = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * 2, _SLAB, _TILE], W)
        x_tiles = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, M, _TILE], W)
        s_boxes = gl.allocate_shared_memory(gl.float32, [STAGES, BOX], FLAT)
        s_tiles = view(s_boxes, gl.float32, [STAGES, BOX], ROW)
        full, empty = pipeline_barriers(STAGES)
        apart = N if IS_GATED else _SLAB
        num_padded = num_blocks * M
        w_scales_ptr += slot.to(gl.int64) * (num_rows // _TILE * num_tiles)
        low_scales_ptr = w_scales_ptr + first // _TILE * num_tiles
        high_scales_ptr = w_scales_ptr + (first + apart) // _TILE * num_tiles
        gl.warp_specialize(
            [
                (_compute, (
                    w_tiles, x_tiles, s_tiles, full, empty, low_scales_ptr, high_scales_ptr,
                    weights_ptr, y_ptr, pairs_ptr, block, first, num_tiles, num_pairs, N, alpha,
                    shift, limit, IS_GATED, M, STAGES,
                )),
                (_load, (
                    w_desc, x_desc, s_desc, w_tiles, x_tiles, s_boxes, full, empty,
                    slot * num_rows + first, apart, block * M, num_padded, num_tiles, M, BOX,
                    STAGES,
                )),
            ],
            [1],
            [24],
        )  # fmt: skip


@jit(do_not_specialize=["num_pairs", "num_padded"])
def _quantize_places(
    x_ptr, pairs_ptr, y_ptr, scales_ptr, num_pairs, num_padded, stride_x, D,
    PAIRS_PER_ROW: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y[place] = x[pair // PAIRS_PER_ROW] of the pair at that place, in FP8 with a scale for each
    TILE channels, scales[tile, place]; PAIRS_PER_ROW 0: x[place]. What has no pair is left as it
    is."""
    wait_for_previous(PDL)
    let_next_start(PDL)
    place = tl.program_id(0).to(tl.int64)
    pair = tl.load(pairs_ptr + place)
    if pair < num_pairs:
        row = place
        if PAIRS_PER_ROW > 0:
            row = (pair // PAIRS_PER_ROW).to(tl.int64)
        channels = tl.arange(0, BLOCK)
        inside = channels < D
        x = tl.load(x_ptr + row * stride_x + channels, mask=inside, other=0.0).to(tl.float32)
        y = quantize_groups(
            x, scales_ptr, num_padded, place, 0, D // TILE, BLOCK // TILE, TILE
        )  # fmt: skip
        tl.store(y_ptr + place * D + channels, y, mask=inside)


def quantized_places(
    x: Tensor, pairs_BM: Tensor, num_pairs: int, pairs_per_row: int
) -> tuple[Tensor, Tensor]:
    """The inputs in the order of blocks, FP8: (values [B * M, D], scales [D / 128, B * M])."""
    num_padded, size = pairs_BM.numel(), x.shape[1]
    values = torch.empty((num_padded, size), dtype=torch.float8_e4m3fn, device=x.device)
    shape = (size // _TILE.value, num_padded)
    scales = torch.empty(shape, dtype=torch.float32, device=x.device)
    block = next_power_of_2(size)
    _quantize_places[(num_padded,)](
        x, pairs_BM, values, scales, num_pairs, num_padded, x.stride(0), size,
        PAIRS_PER_ROW=pairs_per_row, TILE=_TILE.value, BLOCK=block,
        num_warps=max(1, min(8, block // 512)), **launch_options(x),
    )  # fmt: skip
    return values, scales


def _multiply(
    x: tuple[Tensor, Tensor],
    weights: ExpertWeights,
    dtype: torch.dtype,
    weights_TK: Tensor,
    slots_B: Tensor,
    pairs_BM: Tensor,
    c: HopperConfig,
    gate: Gate | None = None,
) -> Tensor:
    """With a gate [B * M, N], else [P, N] weighted; `x` is in the order of blocks."""
    assert weights.scale is not None
    values, scales = x
    num_slots, num_rows, size = weights.values.shape
    num_blocks, rows = pairs_BM.shape
    num_pairs, out_features = weights_TK.numel(), num_rows // (1 if gate is None else 2)
    num_out = num_pairs if gate is None else len(values)
    out = torch.empty((num_out, out_features), dtype=dtype, device=values.device)
    box = max(rows, _MIN_BOX.value)
    w_desc = descriptor(
        weights.values, (num_slots * num_rows, size), (_SLAB.value, _TILE.value), _LAYOUT
    )
    x_desc = descriptor(values, (len(values), size), (rows, _TILE.value), _LAYOUT)
    s_desc = descriptor(scales, (scales.numel(),), (box,), _SCALES_LAYOUT)
    alpha, shift, limit = (gate.alpha, gate.shift, gate.limit) if gate else (0.0, 0.0, 0.0)
    outputs = _SLAB.value if gate else 2 * _SLAB.value
    _fp8_blocks[(out_features // outputs * num_blocks,)](
        w_desc, x_desc, s_desc, weights.scale, weights_TK, out, slots_B, pairs_BM, num_pairs,
        num_blocks, num_slots, out_features, num_rows, size // _TILE.value, alpha, shift, limit,
        IS_GATED=gate is not None, M=rows, BOX=box, STAGES=c.stages, BAND=c.band, num_warps=4,
        maxnreg=c.registers, **launch_options(values),
    )  # fmt: skip
    return out


def block_rows(num_pairs: int, num_slots: int) -> int:
    """Pairs of a block: so many that few experts have more."""
    for rows, most in ((8, 4), (16, 8), (32, 20)):
        if num_pairs <= most * num_slots:
            return rows
    return 64


def fits(x_TD: Tensor, slots_TK: Tensor, gate_up: ExpertWeights, down: ExpertWeights) -> bool:
    """Whether the kernel can compute these on a Hopper GPU, and is the faster one."""
    return (
        x_TD.dtype == torch.bfloat16
        and gate_up.format == down.format == "fp8 blocks"
        and gate_up.in_features % _TILE.value == 0
        and down.in_features % _TILE.value == 0
        and (down.in_features >= _MIN_INPUTS or slots_TK.numel() >= _FULL * down.num_slots)
    )


def experts(
    x_TD: Tensor,
    slots_TK: Tensor,
    weights_TK: Tensor,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    gate: Gate,
    rows: int | None = None,
    config: HopperConfig | None = None,
) -> Tensor:
    """As `kernels.moe.experts` without biases, of what `fits`."""
    num_pairs, num_slots = slots_TK.numel(), down.num_slots
    rows = rows or block_rows(num_pairs, num_slots)
    c = config or CONFIGS[rows]
    pairs_BM, slots_B = sorted_pairs(slots_TK, num_slots, rows)
    shared = (x_TD.dtype, weights_TK, slots_B, pairs_BM, c)
    x = quantized_places(x_TD, pairs_BM, num_pairs, slots_TK.shape[1])
    h = _multiply(x, gate_up, *shared, gate)
    y_PD = _multiply(quantized_places(h, pairs_BM, num_pairs, 0), down, *shared)
    masked_by = None if down.has_all else slots_TK
    return combine(y_PD[None], x_TD.shape[0], x_TD.dtype, masked_by, num_slots)
