"""Paged decode attention: one query per entry, split-KV (flash decoding).

All query heads of a kv head (up to 16) share one tile, so each key and value is read once. Keys are
the rows of MMA tiles and heads the few columns. Each warp owns its own keys, with their maximum,
sum and weighted values, so that warps do not wait for each other; these are reduced at the end.
Nothing on the host depends on device values, so a captured launch stays right as sequences grow.

Where few sequences leave SMs idle, keys are split over programs. How depends on the sequence's own
length alone (`span`), never on the rest of the batch. Where one program per (sequence, kv head)
fills the GPU only long sequences are split, for which all others would wait; where there can be
none the second launch is saved. So the last bits may differ on the two sides of such a batch size.

Decodes that are tokens of one sequence (`Runs`) share a tile, too, Q of them, so that its keys are
read once for all: each sees keys up to itself. The tile's first one says how keys are split, and
the last split has those behind it, too.

An FP8 or INT8 cache is read as pairs of channels: tensor cores take 16-bit elements from shared
memory in any direction, 8-bit ones only in one. Even and odd channels are then multiplied
separately: FP8 as fp16, which holds it exactly, INT8 in q's dtype, as either of the two does. The
scale of a key multiplies its scores, that of a value their weights. NVFP4 is unpacked to fp16,
which holds it exactly, times the scales of 16 channels.

Legend: N entries, H query heads, K kv heads, G = H / K, D head size (of an NVFP4 cache a D has half
of the channels), B blocks, S tokens in one, W warps, Q entries of a tile.
"""

import enum
import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels import tuned
from penstock.kernels.attention.backend import AttentionParams, CacheScales
from penstock.kernels.attention.partial import partial_decode
from penstock.kernels.carveout import DRIVER_DEFAULT, set_carveout
from penstock.kernels.device import num_sms, shared_bytes
from penstock.kernels.forward_batch import Runs
from penstock.kernels.launch import jit
from penstock.kernels.op import arch
from penstock.kernels.pdl import launch_options, let_next_start, wait_for_previous
from penstock.kernels.sizes import cdiv, next_power_of_2
from penstock.kernels.triton_dtypes import TRITON_DTYPES
from penstock.kernels.triton_math import fp8_clamp, nvfp4_values

LOG2_E = 1.4426950408889634
_LOG2_E = tl.constexpr(LOG2_E)  # the same for kernels
LN_2 = tl.constexpr(1.0 / LOG2_E)
NO_WINDOW = 1 << 30
_LOWEST = tl.constexpr(-1.0e30)  # the maximum of no keys; finite: less itself it is 0
_MAX_G = 16  # queries of a tile; more would not fit into a warp's registers
_USUAL_SPLITS = tl.constexpr(32)  # while each has no more keys than
_USUAL_SPAN = tl.constexpr(128)
_REDUCED = tl.constexpr(32)  # splits reduced at once
# H200, 8 kv heads: from 8 sequences on, from 14, from 17, from 66
_ONE_SHORT_WAVE, _ONE_WAVE, _FEW_WAVES, _MANY_WAVES = 0.4, 0.84, 1.0, 4.0
_SPLIT_KV_CARVEOUT = 45  # percent: more would keep GEMVs from overlapping (PDL)
_TABLE_BYTES = 2048  # of shared memory, at most
_VERY_SHORT = 256  # keys: not worth a second launch
_SHORT = 4096  # that one program can walk while the others do
_LONG = 16384  # more are split whatever the number of sequences
_FP4_BITS = 4


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Launch config."""

    tile: int = 64  # keys read at once, 16 or more for each warp
    min_span: int = 32  # keys a split has at least
    max_splits: int = 64
    num_warps: int = 2
    num_stages: int = 5  # of 5 the table's blocks take two
    carveout: int = DRIVER_DEFAULT  # percent, see kernels/carveout.py


class Load(enum.IntEnum):
    """Waves that one program per (sequence, kv head) makes up; the value is an example."""

    PARTIAL_WAVE = 1  # SMs are idle: split-KV
    ONE_WAVE = 16  # nearly one: large programs
    FEW_WAVES = 32  # small programs, deep pipelines
    MANY_WAVES = 256  # or keys are few: shallower pipelines


def load_of(num_programs: int, longest: int) -> Load:
    """`num_programs`: for each sequence and kv head one. `longest`: keys that a sequence may ever
    have, so that steps of all kinds choose the same."""
    num_waves = num_programs / num_sms()
    if num_waves >= _MANY_WAVES or longest <= _VERY_SHORT:
        return Load.MANY_WAVES
    if num_waves >= _FEW_WAVES:
        return Load.FEW_WAVES
    least = _ONE_SHORT_WAVE if longest <= _SHORT else _ONE_WAVE
    return Load.ONE_WAVE if num_waves >= least else Load.PARTIAL_WAVE


def _tile_heads(group: int) -> int:
    """Query heads of a program."""
    return max(8, min(_MAX_G, next_power_of_2(group)))


def _tile_entries(group: int, runs: Runs | None) -> int:
    """Entries of a program."""
    if runs is None:
        return 1
    return max(1, min(_MAX_G // next_power_of_2(group), next_power_of_2(runs.longest)))


def cache_bits(k_cache_BKSD: Tensor, scales: CacheScales | None) -> int:
    """Of a number of the cache."""
    is_nvfp4 = scales is not None and scales.are_nvfp4
    return _FP4_BITS if is_nvfp4 else 8 * k_cache_BKSD.element_size()


def scale_planes(scales: CacheScales | None) -> tuple[Tensor | None, Tensor | None]:
    """As kernels read them: E4M3 as bits, which GPUs without FP8 can load."""
    if scales is None or not scales.are_nvfp4:
        return scales or (None, None)
    return scales.keys.view(torch.uint8), scales.values.view(torch.uint8)


@functools.cache
def decode_config(
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    cache_bits: int,
    load: Load,
    unpacked_bits: int | None = None,
) -> DecodeConfig:
    """Where nothing was tuned, what is best or nearly so on an H200 for 4 and 8 kv heads of size
    64 and 128 in 8 and 16 bits (docs/notes/2026-11-attention.md). `num_heads`: those of all
    entries that share a tile. `unpacked_bits`: of a number in shared memory, if not as cached."""
    is_small = head_size * _tile_heads(num_heads // num_kv_heads) <= 1024
    keys_each = 32 if is_small else 16  # of a warp, for its registers' sake
    bits = unpacked_bits or cache_bits
    row_bytes = 2 * next_power_of_2(head_size) * bits // 8  # of a key and its value
    most, stages = {
        Load.PARTIAL_WAVE: (1, 5),
        Load.ONE_WAVE: (4, 7),
        Load.FEW_WAVES: (2, 7),
        Load.MANY_WAVES: (2, 5),
    }[load]
    room = shared_bytes() - _TABLE_BYTES
    num_warps, num_stages = next(
        (n, num_stages)
        for n, num_stages, part in (
            (most, stages, room // 2), (most, 5, room), (most, 3, room), (most // 2, 3, room),
            (1, 3, room),
        )
        if n and n * keys_each * row_bytes * (num_stages // 2) <= part
    )  # fmt: skip
    usual = DecodeConfig(
        tile=num_warps * keys_each,
        min_span=32 if load is Load.PARTIAL_WAVE else _LONG,
        max_splits=64 if load is Load.PARTIAL_WAVE else 8,
        num_warps=num_warps,
        num_stages=num_stages,
        carveout=_SPLIT_KV_CARVEOUT if load is Load.PARTIAL_WAVE else DRIVER_DEFAULT,
    )
    return tuned.best(
        "decode",
        usual,
        heads=num_heads,
        kv_heads=num_kv_heads,
        head_size=head_size,
        cache_bits=cache_bits,
        sequences=load.value,
    )


def cap_log2(params: AttentionParams) -> float:
    """Of scores whose exponentials are powers of two; 0: they are not capped."""
    return (params.soft_cap or 0.0) * LOG2_E


@triton.jit
def capped_log2(scores, CAP_LOG2: tl.constexpr):
    """cap * tanh(scores / cap), of which tanh(u) = 2 / (1 + e^-2u) - 1."""
    if CAP_LOG2 != 0.0:
        FASTER: tl.constexpr = -2.0 * _LOG2_E / CAP_LOG2
        scores = CAP_LOG2 * (2.0 / (1.0 + tl.exp2(scores * FASTER)) - 1.0)
    return scores


@triton.jit
def first_seen(kv_len, window, HAS_CHUNKS: tl.constexpr):
    """The first key that the last token of a sequence sees."""
    return (kv_len - 1) // window * window if HAS_CHUNKS else tl.maximum(0, kv_len - window)


@triton.jit
def span(num_keys, SPLITS: tl.constexpr, MIN_SPAN: tl.constexpr, TILE: tl.constexpr):
    """Keys per split, a multiple of TILE: a few splits while these are short, then more of them."""
    keys = tl.minimum(tl.cdiv(num_keys, _USUAL_SPLITS), _USUAL_SPAN)
    keys = tl.maximum(tl.maximum(keys, tl.cdiv(num_keys, SPLITS)), MIN_SPAN)
    return tl.cdiv(keys, TILE) * TILE


@triton.jit
def _by_warp(TILE: tl.constexpr, W: tl.constexpr):
    """Numbers of a tile's keys, [W, TILE / W]."""
    EACH: tl.constexpr = TILE // W
    return tl.arange(0, W)[:, None] * EACH + tl.arange(0, EACH)[None, :]


@triton.jit
def _seen(keys, inside, seen_by, ends, Q: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """Whether a query sees a key. Of several entries each has its own bounds."""
    seen = inside[:, :, None]
    if Q > 1:
        at = keys[:, :, None]
        seen = seen & (at < ends[None, None, :])
        if HAS_WINDOW:
            seen = seen & (at >= seen_by[None, None, :])
    return seen


@triton.jit
def _softmax(scores, seen, m, total):
    """Weights of a tile's keys, the factor of what was accumulated before, the new m and total."""
    scores = tl.where(seen, scores, -float("inf"))
    m_new = tl.maximum(m, tl.max(scores, axis=1))
    alpha = tl.exp2(m - m_new)
    p = tl.exp2(scores - m_new[:, None, :])
    return p, alpha, m_new, total * alpha + tl.sum(p, axis=1)


@triton.jit
def load_nvfp4(
    codes_ptr, scales_ptr, is_key, D: tl.constexpr, GROUPED: tl.constexpr, SHAPE: tl.constexpr
):  # fmt: skip
    """Keys (or values) of an NVFP4 cache in fp16, SHAPE [..., BLOCK_D], GROUPED [..., BLOCK_D / 16,
    16]. Of each of them: where its codes and scales begin, and whether it is one, [..., 1]."""
    GROUPS: tl.constexpr = GROUPED[len(GROUPED) - 2]
    pairs, groups = tl.arange(0, GROUPS * 8), tl.arange(0, GROUPS)
    for _ in tl.static_range(len(SHAPE) - 1):
        pairs, groups = tl.expand_dims(pairs, 0), tl.expand_dims(groups, 0)
    codes = tl.load(codes_ptr + pairs, mask=is_key & (pairs < D // 2), other=0)
    scales = tl.load(scales_ptr + groups, mask=is_key & (groups < D // 16), other=0)
    return tl.reshape(nvfp4_values(codes, scales, GROUPED), SHAPE)


@triton.jit
def _attend_plain(
    q, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table_ptr, first_key, end_key, seen_from,
    seen_by, ends, scale_log2, stride_b, stride_s,
    S: tl.constexpr, D: tl.constexpr, Q: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr, TILE: tl.constexpr, W: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SCALES: tl.constexpr, IS_NVFP4: tl.constexpr, CAP_LOG2: tl.constexpr,
):  # fmt: skip
    """As `_attend`."""
    cols = tl.arange(0, BLOCK_D)[None, None, :]
    in_head = cols < D
    SHAPE: tl.constexpr = (W, TILE // W, BLOCK_D)
    GROUPED: tl.constexpr = (W, TILE // W, BLOCK_D // 16, 16)
    q = tl.broadcast_to(tl.trans(q)[None, :, :], (W, BLOCK_D, BLOCK_G))
    m = tl.full((W, BLOCK_G), _LOWEST, tl.float32)
    total = tl.zeros((W, BLOCK_G), tl.float32)
    acc = tl.zeros((W, BLOCK_D, BLOCK_G), tl.float32)
    for start in tl.range(first_key, end_key, TILE):
        keys = start + _by_warp(TILE, W)
        inside = (keys >= seen_from) & (keys < end_key) if HAS_WINDOW else keys < end_key
        block = tl.load(table_ptr + keys // S, mask=inside, other=0).to(tl.int64)
        if IS_NVFP4:
            place, is_key = (keys % S)[:, :, None], inside[:, :, None]
            at = (block * stride_b)[:, :, None] + place * (D // 2)
            scale_at = (block * stride_s)[:, :, None] + place * (D // 16)
            k = load_nvfp4(k_ptr + at, k_scales_ptr + scale_at, is_key, D, GROUPED, SHAPE)
            k = k.to(q.dtype)
            v = load_nvfp4(v_ptr + at, v_scales_ptr + scale_at, is_key, D, GROUPED, SHAPE)
            v = tl.trans(v, 0, 2, 1)
        else:
            at = (block * stride_b + (keys % S) * D)[:, :, None] + cols
            mask = inside[:, :, None] & in_head
            k = tl.load(k_ptr + at, mask=mask, other=0.0).to(q.dtype)
            v = tl.load(v_ptr + tl.trans(at, 0, 2, 1), mask=tl.trans(mask, 0, 2, 1), other=0.0)
        scores = tl.dot(k, q, input_precision="ieee") * scale_log2
        if HAS_SCALES:
            scale_at = block * stride_s + keys % S
            scores *= tl.load(k_scales_ptr + scale_at, mask=inside, other=0.0)[:, :, None]
        scores = capped_log2(scores, CAP_LOG2)
        seen = _seen(keys, inside, seen_by, ends, Q, HAS_WINDOW)
        p, alpha, m, total = _softmax(scores, seen, m, total)
        if HAS_SCALES:
            p *= tl.load(v_scales_ptr + scale_at, mask=inside, other=0.0)[:, :, None]
        v = v.to(q.dtype)
        acc = tl.dot(v, p.to(v.dtype), acc=acc * alpha[:, None, :], input_precision="ieee")
    largest = tl.max(m, axis=0)
    weight = tl.exp2(m - largest[None, :])
    acc = tl.trans(tl.sum(acc * weight[:, None, :], axis=0))
    return largest, tl.sum(total * weight, axis=0), acc


@triton.jit
def _first_of(pair, dtype: tl.constexpr, IS_INT8: tl.constexpr, ON_GPU: tl.constexpr):
    """The first of two 8-bit numbers as `dtype`: INT8 in q's, FP8 in fp16."""
    if IS_INT8:
        number = ((pair << 8) >> 8).to(dtype)
    elif ON_GPU:  # two pairs at once
        number = tl.inline_asm_elementwise(
            """{
            .reg .b32 firsts;
            .reg .b16 low, high;
            prmt.b32 firsts, $1, 0, 0x4420;
            mov.b32 {low, high}, firsts;
            cvt.rn.f16x2.e4m3x2 $0, low;
            }""", "=r,r", [pair], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        bits = ((pair << 7) & 0x3F80) | ((pair << 8) & -0x8000)
        number = bits.to(tl.float16, bitcast=True) * 256.0
    return number


@triton.jit
def _second_of(pair, dtype: tl.constexpr, IS_INT8: tl.constexpr, ON_GPU: tl.constexpr):
    if IS_INT8:
        number = (pair >> 8).to(dtype)
    elif ON_GPU:
        number = tl.inline_asm_elementwise(
            """{
            .reg .b32 seconds;
            .reg .b16 low, high;
            prmt.b32 seconds, $1, 0, 0x4431;
            mov.b32 {low, high}, seconds;
            cvt.rn.f16x2.e4m3x2 $0, low;
            }""", "=r,r", [pair], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        bits = ((pair >> 1) & 0x3F80) | (pair & -0x8000)
        number = bits.to(tl.float16, bitcast=True) * 256.0
    return number


@triton.jit
def _attend_pairs(
    q_even, q_odd, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table_ptr, first_key, end_key,
    seen_from, seen_by, ends, scale_log2, stride_b, stride_s,
    S: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_P: tl.constexpr, TILE: tl.constexpr, W: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SCALES: tl.constexpr, CAP_LOG2: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """As `_attend`, of an 8-bit cache seen as P pairs a head: with scales INT8, else FP8."""
    dtype: tl.constexpr = q_even.dtype
    cols = tl.arange(0, BLOCK_P)[None, None, :]
    in_head = cols < P
    q_even = tl.broadcast_to(tl.trans(q_even)[None, :, :], (W, BLOCK_P, BLOCK_G))
    q_odd = tl.broadcast_to(tl.trans(q_odd)[None, :, :], (W, BLOCK_P, BLOCK_G))
    m = tl.full((W, BLOCK_G), _LOWEST, tl.float32)
    total = tl.zeros((W, BLOCK_G), tl.float32)
    even = tl.zeros((W, BLOCK_P, BLOCK_G), tl.float32)
    odd = tl.zeros((W, BLOCK_P, BLOCK_G), tl.float32)
    for start in tl.range(first_key, end_key, TILE):
        keys = start + _by_warp(TILE, W)
        inside = (keys >= seen_from) & (keys < end_key) if HAS_WINDOW else keys < end_key
        block = tl.load(table_ptr + keys // S, mask=inside, other=0).to(tl.int64)
        at = (block * stride_b + (keys % S) * P)[:, :, None] + cols
        mask = inside[:, :, None] & in_head
        k = tl.load(k_ptr + at, mask=mask, other=0)
        v = tl.load(v_ptr + tl.trans(at, 0, 2, 1), mask=tl.trans(mask, 0, 2, 1), other=0)
        scores = tl.dot(_first_of(k, dtype, HAS_SCALES, ON_GPU), q_even)
        scores = tl.dot(_second_of(k, dtype, HAS_SCALES, ON_GPU), q_odd, acc=scores) * scale_log2
        if HAS_SCALES:
            scale_at = block * stride_s + keys % S
            scores *= tl.load(k_scales_ptr + scale_at, mask=inside, other=0.0)[:, :, None]
        scores = capped_log2(scores, CAP_LOG2)
        seen = _seen(keys, inside, seen_by, ends, Q, HAS_WINDOW)
        p, alpha, m, total = _softmax(scores, seen, m, total)
        if HAS_SCALES:
            p *= tl.load(v_scales_ptr + scale_at, mask=inside, other=0.0)[:, :, None]
        p = p.to(dtype)
        even = tl.dot(_first_of(v, dtype, HAS_SCALES, ON_GPU), p, acc=even * alpha[:, None, :])
        odd = tl.dot(_second_of(v, dtype, HAS_SCALES, ON_GPU), p, acc=odd * alpha[:, None, :])
    largest = tl.max(m, axis=0)
    weight = tl.exp2(m - largest[None, :])
    even = tl.trans(tl.sum(even * weight[:, None, :], axis=0))
    odd = tl.trans(tl.sum(odd * weight[:, None, :], axis=0))
    return largest, tl.sum(total * weight, axis=0), even, odd


@triton.jit
def _attend(
    q, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table_ptr, first_key, end_key, seen_from,
    seen_by, ends, scale_log2, stride_b, stride_s,
    S: tl.constexpr, D: tl.constexpr, Q: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr, TILE: tl.constexpr, W: tl.constexpr, HAS_WINDOW: tl.constexpr,
    IN_PAIRS: tl.constexpr, HAS_SCALES: tl.constexpr, IS_NVFP4: tl.constexpr,
    CAP_LOG2: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """Running maximum m, sum total and weighted values acc of the keys [first_key, end_key).

    HAS_WINDOW: no entry sees those before `seen_from`. They may be of another sequence by now, and
    NaN, which the weight 0 does not undo: they are not read.
    """
    if IN_PAIRS:
        if not HAS_SCALES:
            q = q.to(tl.float16)
        pairs = tl.reshape(q, (BLOCK_G, BLOCK_D // 2, 2))
        q_even, q_odd = tl.split(pairs)
        m, total, even, odd = _attend_pairs(
            q_even, q_odd, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table_ptr, first_key, end_key,
            seen_from, seen_by, ends, scale_log2, stride_b, stride_s, S, D // 2, Q, BLOCK_G,
            BLOCK_D // 2, TILE, W, HAS_WINDOW, HAS_SCALES, CAP_LOG2, ON_GPU,
        )  # fmt: skip
        acc = tl.interleave(even, odd)
    else:
        if IS_NVFP4 and q.dtype == tl.bfloat16:
            q = q.to(tl.float16)
        m, total, acc = _attend_plain(
            q, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table_ptr, first_key, end_key, seen_from,
            seen_by, ends, scale_log2, stride_b, stride_s, S, D, Q, BLOCK_G, BLOCK_D, TILE, W,
            HAS_WINDOW, HAS_SCALES, IS_NVFP4, CAP_LOG2,
        )  # fmt: skip
    return m, total, acc


@triton.jit
def _to_output(x, dtype: tl.constexpr, out_dtype: tl.constexpr, out_scale_ptr):
    """Fused quantization epilogue: x in `dtype`, or in FP8 divided by the scale."""
    x = x.to(dtype)
    if out_dtype.primitive_bitwidth == 8:
        x = x.to(tl.float32) / tl.load(out_scale_ptr)
        x = fp8_clamp(x)
    return x.to(out_dtype)


@triton.jit
def _store(
    to, inside, m, total, acc, sink_ptr, is_head, out_scale_ptr, lse_to,
    dtype: tl.constexpr, HAS_SINKS: tl.constexpr, GIVES_LSE: tl.constexpr,
):  # fmt: skip
    """What an entry's only program found."""
    if GIVES_LSE:
        tl.store(lse_to, (m + tl.log2(total)) * LN_2, mask=is_head)
    if HAS_SINKS:
        total += tl.exp2(tl.load(sink_ptr, mask=is_head, other=0.0) * _LOG2_E - m)
    out = _to_output(acc / total[:, None], dtype, to.dtype.element_ty, out_scale_ptr)
    tl.store(to, out, mask=inside)


@jit
def _decode(
    q_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, out_ptr, partial_ptr, lse_ptr, rows_ptr,
    kv_lens_ptr, offsets_ptr, table_ptr, sinks_ptr, out_scale_ptr, out_lse_ptr,
    scale_log2, v_scale, window, stride_qn, stride_b, stride_s, stride_table,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, S: tl.constexpr, Q: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr, W: tl.constexpr,
    MIN_SPAN: tl.constexpr, SPLITS: tl.constexpr, DIRECT: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr, IN_PAIRS: tl.constexpr, HAS_SCALES: tl.constexpr,
    IS_NVFP4: tl.constexpr, HAS_CHUNKS: tl.constexpr, CAP_LOG2: tl.constexpr,
    GIVES_LSE: tl.constexpr, ON_GPU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (k, n, p) takes the p-th split of entry n and kv head k / PARTS, of whose query heads
    it has BLOCK_G / Q; with Q > 1 of up to Q entries of a run, from n on, if n begins such a tile.

    Where there is only one it is written to out[n], sinks included, else to partial[n, h, p], with
    its log2-sum-exp. DIRECT: there is only one of every entry. GIVES_LSE: the log-sum-exp of all
    its keys to out_lse[n], sinks not included. HAS_SCALES: of each cached key and value.
    """
    let_next_start(PDL)
    HEADS: tl.constexpr = BLOCK_G // Q
    PARTS: tl.constexpr = (G + HEADS - 1) // HEADS
    kv_head = tl.program_id(0) // PARTS
    entry = tl.program_id(1).to(tl.int64)
    # Of the step, not of the layer: written before any kernel that lets others start early.
    if Q > 1:
        offset = tl.load(offsets_ptr + entry)
    kv_len = tl.load(kv_lens_ptr + entry)
    row = tl.load(rows_ptr + entry).to(tl.int64)
    wait_for_previous(PDL)
    if Q > 1:  # noqa: SIM102
        if offset % Q != 0:
            return
    seen_from = first_seen(kv_len, window, HAS_CHUNKS)
    first = seen_from // TILE * TILE

    if Q > 1:  # columns of the tile are the heads of one entry after the other
        place = tl.arange(0, BLOCK_G) // HEADS
        g = tl.arange(0, BLOCK_G) % HEADS
        owner = entry + place
        in_step = owner < tl.num_programs(1)
        is_of_run = tl.load(offsets_ptr + owner, mask=in_step, other=-1) == offset + place
        is_head = is_of_run & (g < G)
        n = owner[:, None]
        ends = kv_len + place
        seen_by = first_seen(ends, window, HAS_CHUNKS)
        end = kv_len + tl.max(tl.where(is_of_run, place, 0), axis=0)
    else:
        g = tl.program_id(0) % PARTS * BLOCK_G + tl.arange(0, BLOCK_G)
        owner = entry
        is_head = g < G
        n = entry
        ends = kv_len
        seen_by = seen_from
        end = kv_len
    heads = (kv_head * G + g)[:, None]
    cols = tl.arange(0, BLOCK_D)[None, :]
    inside = is_head[:, None] & (cols < D)
    q = tl.load(q_ptr + n * stride_qn + heads * D + cols, mask=inside, other=0.0)
    HEAD: tl.constexpr = S * D // 2 if IN_PAIRS or IS_NVFP4 else S * D
    k_ptr += kv_head * HEAD
    v_ptr += kv_head * HEAD
    if HAS_SCALES:
        k_scales_ptr += kv_head * S
        v_scales_ptr += kv_head * S
    elif IS_NVFP4:
        k_scales_ptr += kv_head * (S * D // 16)
        v_scales_ptr += kv_head * (S * D // 16)
    table_ptr += row * stride_table

    to = out_ptr + (n * (K * G) + heads) * D + cols
    sink_ptr = sinks_ptr + kv_head * G + g
    lse_to = out_lse_ptr + owner * (K * G) + kv_head * G + g
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    if DIRECT:
        m, total, acc = _attend(
            q, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table_ptr, first, end, seen_from, seen_by,
            ends, scale_log2, stride_b, stride_s, S, D, Q, BLOCK_G, BLOCK_D, TILE, W, HAS_WINDOW,
            IN_PAIRS, HAS_SCALES, IS_NVFP4, CAP_LOG2, ON_GPU,
        )  # fmt: skip
        _store(
            to, inside, m, total, acc * v_scale, sink_ptr, is_head, out_scale_ptr, lse_to, dtype,
            HAS_SINKS, GIVES_LSE,
        )  # fmt: skip
    else:
        keys_each = span(kv_len - first, SPLITS, MIN_SPAN, TILE)
        num_splits = tl.cdiv(kv_len - first, keys_each)
        split = tl.program_id(2)
        if split < num_splits:
            start = first + split * keys_each
            if Q > 1:
                split_end = tl.where(split == num_splits - 1, end, start + keys_each)
            else:
                split_end = tl.minimum(start + keys_each, kv_len)
            m, total, acc = _attend(
                q, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table_ptr, start, split_end,
                seen_from, seen_by, ends, scale_log2, stride_b, stride_s, S, D, Q, BLOCK_G,
                BLOCK_D, TILE, W, HAS_WINDOW, IN_PAIRS, HAS_SCALES, IS_NVFP4, CAP_LOG2, ON_GPU,
            )  # fmt: skip
            if num_splits == 1:
                _store(
                    to, inside, m, total, acc * v_scale, sink_ptr, is_head, out_scale_ptr, lse_to,
                    dtype, HAS_SINKS, GIVES_LSE,
                )  # fmt: skip
            else:
                at = (owner * (K * G) + kv_head * G + g) * SPLITS + split
                lse = m + tl.log2(total)
                if Q > 1:  # an entry may see none of these keys
                    sees = total > 0.0
                    lse = tl.where(sees, lse, m)
                    total = tl.where(sees, total, 1.0)
                out = acc / total[:, None] * v_scale
                tl.store(partial_ptr + at[:, None] * D + cols, out, mask=inside)
                tl.store(lse_ptr + at, lse, mask=is_head)


@jit
def reduce_splits(
    partial_ptr, lse_ptr, out_ptr, out_lse_ptr, kv_lens_ptr, offsets_ptr, sinks_ptr, out_scale_ptr,
    window,
    dtype: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, Q: tl.constexpr,
    TILE: tl.constexpr, MIN_SPAN: tl.constexpr, SPLITS: tl.constexpr, HAS_SINKS: tl.constexpr,
    IS_ONE_DONE: tl.constexpr, HAS_CHUNKS: tl.constexpr, GIVES_LSE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out[n, h] = sum over splits of partial * 2^lse / (sum over splits of 2^lse + e^sink).

    Program (h, n, i) has the i-th BLOCK_D channels. IS_ONE_DONE: what has one split is there.
    """
    let_next_start(PDL)
    head = tl.program_id(0)
    entry = tl.program_id(1).to(tl.int64)
    kv_len = tl.load(kv_lens_ptr + entry)  # of the step, as above
    if Q > 1:  # of the entry that begins the tile
        kv_len -= tl.load(offsets_ptr + entry) % Q
    wait_for_previous(PDL)
    num_keys = kv_len - first_seen(kv_len, window, HAS_CHUNKS) // TILE * TILE
    num_splits = tl.cdiv(num_keys, span(num_keys, SPLITS, MIN_SPAN, TILE))
    if IS_ONE_DONE and num_splits == 1:
        return

    cols = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    largest, total = -float("inf"), 0.0
    out = tl.zeros((BLOCK_D,), tl.float32)
    for first in range(0, num_splits, _REDUCED):
        splits = first + tl.arange(0, _REDUCED)
        at = (entry * H + head) * SPLITS + splits
        mask = (splits < num_splits)[:, None] & (cols < D)[None, :]
        partial = tl.load(partial_ptr + at[:, None] * D + cols[None, :], mask=mask, other=0.0)
        lse = tl.load(lse_ptr + at, mask=splits < num_splits, other=-float("inf"))
        before, largest = largest, tl.maximum(largest, tl.max(lse, axis=0))
        alpha, weight = tl.exp2(before - largest), tl.exp2(lse - largest)
        total = total * alpha + tl.sum(weight, axis=0)
        out = out * alpha + tl.sum(partial * weight[:, None], axis=0)
    if GIVES_LSE:
        tl.store(out_lse_ptr + entry * H + head, (largest + tl.log2(total)) * LN_2)
    if HAS_SINKS:
        total += tl.exp2(tl.load(sinks_ptr + head) * _LOG2_E - largest)
    out /= total
    to = out_ptr + (entry * H + head) * D + cols
    tl.store(to, _to_output(out, dtype, out_ptr.dtype.element_ty, out_scale_ptr), mask=cols < D)


def decode(
    q_NHD: Tensor,
    k_cache_BKSD: Tensor,
    v_cache_BKSD: Tensor,
    rows_N: Tensor,
    kv_lens_N: Tensor,
    block_table_RM: Tensor,
    out_NHD: Tensor,
    params: AttentionParams,
    max_kv_len: int,
    config: DecodeConfig | None = None,
    sinks_H: Tensor | None = None,
    scales: CacheScales | None = None,
    out_scale_1: Tensor | None = None,
    lse_NH: Tensor | None = None,
    runs: Runs | None = None,
) -> None:
    """out[n] = attention of q[n] over the kv_lens[n] cached tokens of row rows[n].

    Where `out_NHD` is FP8 its scale is `out_scale_1` (fused quantization epilogue). `lse_NH`
    (fp32) is given the logarithms of the sums of exponentials.

    The partial results live in memory from the caching allocator: inside a captured graph that is
    the graph's own pool, which all layers and graphs share.
    """
    num_entries, num_heads, head_size = q_NHD.shape
    _, num_kv_heads, block_size, _ = k_cache_BKSD.shape
    assert q_NHD.stride()[1:] == (head_size, 1) and out_NHD.is_contiguous(), q_NHD.stride()
    assert k_cache_BKSD[0].is_contiguous() and k_cache_BKSD.stride() == v_cache_BKSD.stride()
    group = num_heads // num_kv_heads
    tile_entries = _tile_entries(group, runs)
    block_g = _tile_heads(group * tile_entries)
    num_tiles = num_kv_heads * cdiv(group, block_g // tile_entries)  # of heads
    longest = block_table_RM.shape[1] * block_size
    if params.window is not None:
        max_kv_len, longest = min(max_kv_len, params.window), min(longest, params.window)
    is_nvfp4 = scales is not None and scales.are_nvfp4
    c = config or decode_config(
        num_heads * tile_entries, num_kv_heads, head_size, cache_bits(k_cache_BKSD, scales),
        load_of(cdiv(num_entries, tile_entries) * num_tiles, longest),
        8 * q_NHD.element_size() if is_nvfp4 else None,
    )  # fmt: skip
    is_direct = longest <= c.min_span
    num_splits = min(c.max_splits, cdiv(max_kv_len + c.tile, c.min_span))
    in_pairs = k_cache_BKSD.element_size() == 1 and q_NHD.element_size() == 2 and not is_nvfp4
    if in_pairs:
        k_cache_BKSD, v_cache_BKSD = (x.view(torch.int16) for x in (k_cache_BKSD, v_cache_BKSD))
    window = NO_WINDOW if params.window is None else params.window
    sinks = kv_lens_N if sinks_H is None else sinks_H  # not read where there are none
    k_scales, v_scales = scale_planes(scales)
    block_d = next_power_of_2(head_size)
    partial, lse = out_NHD, out_NHD  # not used where nothing is split
    gives_lse = lse_NH is not None
    out_lse = out_NHD if lse_NH is None else lse_NH
    offsets_N = None if runs is None or tile_entries == 1 else runs.offsets_N
    if not is_direct:
        shape = (num_entries, num_heads, c.max_splits)
        partial = torch.empty((*shape, head_size), dtype=torch.float32, device=q_NHD.device)
        lse = torch.empty(shape, dtype=torch.float32, device=q_NHD.device)
    kernel = _decode[(num_tiles, num_entries, 1 if is_direct else num_splits)](
        q_NHD, k_cache_BKSD, v_cache_BKSD, k_scales, v_scales, out_NHD, partial, lse,
        rows_N, kv_lens_N, offsets_N, block_table_RM, sinks, out_scale_1, out_lse,
        params.scale * LOG2_E, params.v_scale, window, q_NHD.stride(0), k_cache_BKSD.stride(0),
        0 if k_scales is None else k_scales.stride(0), block_table_RM.stride(0),
        K=num_kv_heads, G=group, D=head_size, S=block_size, Q=tile_entries, BLOCK_G=block_g,
        BLOCK_D=block_d,
        TILE=c.tile, W=min(c.num_warps, c.tile // 16), MIN_SPAN=c.min_span, SPLITS=c.max_splits,
        DIRECT=is_direct, HAS_WINDOW=params.window is not None, HAS_SINKS=sinks_H is not None,
        IN_PAIRS=in_pairs,
        HAS_SCALES=scales is not None and not is_nvfp4, IS_NVFP4=is_nvfp4,
        HAS_CHUNKS=params.has_chunks, CAP_LOG2=cap_log2(params),
        GIVES_LSE=gives_lse, ON_GPU=q_NHD.is_cuda,
        num_warps=c.num_warps, num_stages=c.num_stages, **launch_options(q_NHD),
    )  # fmt: skip
    set_carveout(kernel, c.carveout)
    if not is_direct and num_splits > 1:
        reduce_splits[(num_heads, num_entries, 1)](
            partial, lse, out_NHD, out_lse, kv_lens_N, offsets_N, sinks, out_scale_1, window,
            dtype=TRITON_DTYPES[q_NHD.dtype], H=num_heads, D=head_size, BLOCK_D=block_d,
            Q=tile_entries, TILE=c.tile, MIN_SPAN=c.min_span, SPLITS=c.max_splits,
            HAS_SINKS=sinks_H is not None, IS_ONE_DONE=True, HAS_CHUNKS=params.has_chunks,
            GIVES_LSE=gives_lse, num_warps=4, **launch_options(q_NHD),
        )  # fmt: skip


@partial_decode.impl("triton", needs=arch(80))
def partial_decode_triton(
    q_NHD,
    k_cache_BKSD,
    v_cache_BKSD,
    rows_N,
    kv_lens_N,
    block_table_RM,
    params,
    max_kv_len,
    k_scales=None,
    v_scales=None,
):
    out_NHD = torch.empty(q_NHD.shape, dtype=q_NHD.dtype, device=q_NHD.device)
    lse_NH = torch.empty(q_NHD.shape[:2], dtype=torch.float32, device=q_NHD.device)
    scales = None if k_scales is None else CacheScales(k_scales, v_scales)
    decode(
        q_NHD, k_cache_BKSD, v_cache_BKSD, rows_N, kv_lens_N, block_table_RM, out_NHD, params,
        max_kv_len, scales=scales, lse_NH=lse_NH,
    )  # fmt: skip
    return out_NHD, lse_NH
