"""Paged causal attention of many queries per sequence, over a cached prefix and the chunk itself.

A tile's rows are (query, head of the kv head) pairs, so one read of a key serves all heads that
share it and a short chunk still fills the tile. `hopper_prefill` does the same where it fits.

Legend: T tokens, N sequences, H query heads, K kv heads, G = H / K, D head size (of an NVFP4 cache
a D has half of the channels), B blocks, S tokens per block.
"""

import functools
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels import tuned
from penstock.kernels.attention.backend import AttentionParams, CacheScales
from penstock.kernels.attention.triton_decode import (
    LOG2_E,
    cache_bits,
    cap_log2,
    capped_log2,
    load_nvfp4,
    scale_planes,
)
from penstock.kernels.device import shared_bytes
from penstock.kernels.hopper import HopperKernels
from penstock.kernels.launch import jit
from penstock.kernels.pdl import launch_options, let_next_start, wait_for_previous
from penstock.kernels.sizes import next_power_of_2

_LOG2_E = tl.constexpr(LOG2_E)
_HOPPER = HopperKernels("penstock.kernels.attention.hopper_prefill", "prompts are attended")


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Launch config."""

    rows: int = 128  # (query, head) pairs of one program
    tile: int = 64  # keys read at once
    num_warps: int = 8
    num_stages: int = 5  # H200, head size 128: 1x8192 1.53 ms, 1.73 with 3; 8x1024 0.28, 0.30


@functools.cache
def prefill_config(
    num_heads: int, num_kv_heads: int, head_size: int, element_bytes: int, cache_bits: int
) -> PrefillConfig:
    if element_bytes > 2:
        # No tensor cores in full precision: a larger tile would not fit registers.
        usual = PrefillConfig(rows=32, tile=16, num_warps=4, num_stages=2)
    elif head_size > 128:
        # 104 KiB with 128 rows, more than sm_86, sm_89 and sm_120 have.
        rows = 128 if shared_bytes() >= 104 << 10 else 64
        usual = PrefillConfig(rows=rows, tile=32, num_stages=2)
    else:
        usual = PrefillConfig()
    return tuned.best(
        "prefill",
        usual,
        heads=num_heads,
        kv_heads=num_kv_heads,
        head_size=head_size,
        bits=8 * element_bytes,
        cache_bits=cache_bits,
    )


@triton.jit
def _attend(
    q, m, total, acc, positions, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table_ptr, first_key,
    end_key, seen_from, kv_len, scale_log2, window, stride_b, stride_s,
    S: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr,
    MASKED: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SCALES: tl.constexpr,
    IS_NVFP4: tl.constexpr, HAS_CHUNKS: tl.constexpr, CAP_LOG2: tl.constexpr,
):  # fmt: skip
    """Take the keys [first_key, end_key) into every row's running maximum, total and values.

    Not MASKED: whole tiles that every row sees. Keys before `seen_from` no row sees: as those from
    `kv_len` on they may be of another sequence, and NaN, and are not read.
    """
    cols = tl.arange(0, BLOCK_D)[None, :]
    SHAPE: tl.constexpr = (TILE, BLOCK_D)
    GROUPED: tl.constexpr = (TILE, BLOCK_D // 16, 16)
    for start in tl.range(first_key, end_key, TILE):
        keys = start + tl.arange(0, TILE)
        known = (keys >= seen_from) & (keys < kv_len) if HAS_WINDOW else keys < kv_len
        if MASKED:
            block = tl.load(table_ptr + keys // S, mask=known, other=0).to(tl.int64)
        else:
            block = tl.load(table_ptr + keys // S).to(tl.int64)
        at = (block * stride_b + (keys % S) * D)[:, None] + cols
        if IS_NVFP4:
            place, is_key = (keys % S)[:, None], known[:, None]
            at = (block * stride_b)[:, None] + place * (D // 2)
            scale_at = (block * stride_s)[:, None] + place * (D // 16)
            k = load_nvfp4(k_ptr + at, k_scales_ptr + scale_at, is_key, D, GROUPED, SHAPE)
            v = load_nvfp4(v_ptr + at, v_scales_ptr + scale_at, is_key, D, GROUPED, SHAPE)
            k, v = k.to(q.dtype), v.to(q.dtype)
        elif MASKED or BLOCK_D != D:
            mask = known[:, None] & (cols < D)
            k = tl.load(k_ptr + at, mask=mask, other=0.0).to(q.dtype)
            v = tl.load(v_ptr + at, mask=mask, other=0.0).to(q.dtype)
        else:
            k = tl.load(k_ptr + at).to(q.dtype)
            v = tl.load(v_ptr + at).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        if HAS_SCALES:
            scale_at = block * stride_s + keys % S
            scores *= tl.load(k_scales_ptr + scale_at, mask=known, other=0.0)[None, :]
        scores = capped_log2(scores, CAP_LOG2)
        if MASKED:
            age = positions[:, None] - keys[None, :]
            # Finite, so that a row that sees nothing of its first tile stays free of NaN; and after
            # the scaling, which must not be fused into the difference below: for such a row that
            # would be the rounding error of -1e30 instead of 0.
            seen = (age >= 0) & (age < window) if HAS_WINDOW and not HAS_CHUNKS else age >= 0
            if HAS_CHUNKS:
                seen &= keys[None, :] >= (positions // window * window)[:, None]
            scores = tl.where(seen, scores, -1.0e30)
        m_new = tl.maximum(m, tl.max(scores, axis=1))
        alpha = tl.exp2(m - m_new)
        p = tl.exp2(scores - m_new[:, None])
        total = total * alpha + tl.sum(p, axis=1)
        if HAS_SCALES:
            p *= tl.load(v_scales_ptr + scale_at, mask=known, other=0.0)[None, :]
        acc = tl.dot(p.to(v.dtype), v, acc=acc * alpha[:, None], input_precision="ieee")
        m = m_new
    return m, total, acc


@triton.jit
def tile_of(slot, starts_ptr, first_entry, end_entry, G: tl.constexpr, ROWS: tl.constexpr):
    """(entry, number of its tile of ROWS rows) of a slot: entry n's slots begin at its first row //
    ROWS + n, rows and entries counted from `first_entry`. Each entry has a slot for each of its
    tiles and at most one more, so a launch need not know how many tokens an entry has."""
    first = tl.load(starts_ptr + first_entry)
    low = first_entry
    high = end_entry
    while high - low > 1:
        middle = (low + high) // 2
        begin = (tl.load(starts_ptr + middle) - first) * G // ROWS + middle - first_entry
        low = tl.where(begin <= slot, middle, low)
        high = tl.where(begin <= slot, high, middle)
    begin = (tl.load(starts_ptr + low) - first) * G // ROWS + low - first_entry
    return low, slot - begin


def num_slots(num_tokens: int, num_entries: int, group: int, rows: int) -> int:
    """Of `tile_of`, for so many tokens of so many entries."""
    return num_tokens * group // rows + num_entries


@jit(do_not_specialize=["first_entry", "end_entry", "num_tokens"])
def _prefill(
    q_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, out_ptr, rows_ptr, starts_ptr, kv_lens_ptr,
    table_ptr, sinks_ptr,
    first_entry, end_entry, num_tokens, scale_log2, v_scale, window, stride_qt, stride_b, stride_s,
    stride_table,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, S: tl.constexpr, BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_SCALES: tl.constexpr, IS_NVFP4: tl.constexpr, HAS_CHUNKS: tl.constexpr,
    CAP_LOG2: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, k): the i-th last slot (`tile_of`), for kv head k.

    Row r is head r % G of query r // G. The last tiles see the most keys and start first. Tokens
    behind the last entry's are padding and become zeros.
    """
    let_next_start(PDL)
    wait_for_previous(PDL)
    kv_head = tl.program_id(1)
    slot = tl.num_programs(0) - 1 - tl.program_id(0)
    entry, tile = tile_of(slot, starts_ptr, first_entry, end_entry, G, ROWS)
    start = tl.load(starts_ptr + entry)
    num_queries = tl.load(starts_ptr + entry + 1) - start
    rows = tile * ROWS + tl.arange(0, ROWS)
    queries = rows // G
    heads = kv_head * G + rows % G
    tokens = (start + queries).to(tl.int64)
    cols = tl.arange(0, BLOCK_D)[None, :]
    out_ptr += (tokens * (K * G) + heads)[:, None] * D + cols
    if tile * ROWS >= num_queries * G:
        end = tl.where(entry == end_entry - 1, num_tokens, 0)
        nothing = tl.zeros((ROWS, BLOCK_D), out_ptr.dtype.element_ty)
        tl.store(out_ptr, nothing, mask=(tokens < end)[:, None] & (cols < D))
        return
    kv_len = tl.load(kv_lens_ptr + entry)
    table_ptr += tl.load(rows_ptr + entry).to(tl.int64) * stride_table
    HEAD: tl.constexpr = S * D // 2 if IS_NVFP4 else S * D
    k_ptr += kv_head * HEAD
    v_ptr += kv_head * HEAD
    if HAS_SCALES:
        k_scales_ptr += kv_head * S
        v_scales_ptr += kv_head * S
    elif IS_NVFP4:
        k_scales_ptr += kv_head * (S * D // 16)
        v_scales_ptr += kv_head * (S * D // 16)

    inside = (queries < num_queries)[:, None] & (cols < D)
    q_at = tokens[:, None] * stride_qt + heads[:, None] * D + cols
    q = tl.load(q_ptr + q_at, mask=inside, other=0.0)
    if (IS_NVFP4 or k_ptr.dtype.element_ty.is_fp8()) and q.dtype == tl.bfloat16:
        q = q.to(tl.float16)  # it holds FP8, and FP4 times its scale, exactly

    num_before = kv_len - num_queries
    positions = num_before + queries
    first_position = num_before + tile * ROWS // G
    last_query = tl.minimum((tile * ROWS + ROWS - 1) // G, num_queries - 1)
    end_key = num_before + last_query + 1
    m = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, BLOCK_D), tl.float32)
    seen_from = 0
    if HAS_CHUNKS:
        seen_from = first_position // window * window
        masked_from = seen_from // TILE * TILE
    elif HAS_WINDOW:
        seen_from = tl.maximum(0, first_position - window + 1)
        masked_from = seen_from // TILE * TILE
    else:
        masked_from = (first_position + 1) // TILE * TILE
        m, total, acc = _attend(
            q, m, total, acc, positions, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table_ptr, 0,
            masked_from, 0, kv_len, scale_log2, window, stride_b, stride_s, S, D, BLOCK_D, TILE,
            False, False, HAS_SCALES, IS_NVFP4, False, CAP_LOG2,
        )  # fmt: skip
    m, total, acc = _attend(
        q, m, total, acc, positions, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table_ptr,
        masked_from, end_key, seen_from, kv_len, scale_log2, window, stride_b, stride_s, S, D,
        BLOCK_D, TILE, True, HAS_WINDOW, HAS_SCALES, IS_NVFP4, HAS_CHUNKS, CAP_LOG2,
    )  # fmt: skip
    if HAS_SINKS:
        total += tl.exp2(tl.load(sinks_ptr + heads) * _LOG2_E - m)
    out = (acc / total[:, None] * v_scale).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr, out, mask=inside)


def prefill(
    q_THD: Tensor,
    k_cache_BKSD: Tensor,
    v_cache_BKSD: Tensor,
    rows_N: Tensor,
    query_starts_N1: Tensor,
    kv_lens_N: Tensor,
    block_table_RM: Tensor,
    out_THD: Tensor,
    params: AttentionParams,
    first_entry: int,
    config: PrefillConfig | None = None,
    sinks_H: Tensor | None = None,
    scales: CacheScales | None = None,
) -> None:
    """Attention of the entries from `first_entry` on, each over all its cached tokens. Every entry
    before has one token at least. Where tokens are left behind the last entry's, it has none, and
    they become zeros.

    `config` is of this module's kernel; without it the Hopper one may be used.
    """
    _, num_heads, head_size = q_THD.shape
    _, num_kv_heads, block_size, _ = k_cache_BKSD.shape
    assert q_THD.stride()[1:] == (head_size, 1) and out_THD.is_contiguous(), q_THD.stride()
    assert k_cache_BKSD[0].is_contiguous() and k_cache_BKSD.stride() == v_cache_BKSD.stride()
    hopper = _HOPPER.module(q_THD) if config is None and params.is_plain else None
    if hopper is not None and hopper.fits(q_THD, k_cache_BKSD):
        try:
            hopper.prefill(
                q_THD, k_cache_BKSD, v_cache_BKSD, rows_N, query_starts_N1, kv_lens_N,
                block_table_RM, out_THD, params, first_entry, sinks_H,
            )  # fmt: skip
            return
        except Exception as error:  # of a lost device: the launch below meets it again
            _HOPPER.give_up(error)
    c = config or prefill_config(
        num_heads, num_kv_heads, head_size, q_THD.element_size(), cache_bits(k_cache_BKSD, scales)
    )
    k_scales, v_scales = scale_planes(scales)
    is_nvfp4 = scales is not None and scales.are_nvfp4
    group = num_heads // num_kv_heads
    num_entries = len(rows_N)
    slots = num_slots(len(q_THD) - first_entry, num_entries - first_entry, group, c.rows)
    _prefill[slots, num_kv_heads](
        q_THD, k_cache_BKSD, v_cache_BKSD, k_scales, v_scales, out_THD, rows_N,
        query_starts_N1, kv_lens_N, block_table_RM,
        kv_lens_N if sinks_H is None else sinks_H,  # not read without sinks
        first_entry, num_entries, len(q_THD), params.scale * LOG2_E, params.v_scale,
        params.window or 0, q_THD.stride(0), k_cache_BKSD.stride(0),
        0 if k_scales is None else k_scales.stride(0), block_table_RM.stride(0),
        K=num_kv_heads, G=group, D=head_size, S=block_size,
        BLOCK_D=next_power_of_2(head_size), ROWS=c.rows, TILE=c.tile,
        HAS_WINDOW=params.window is not None, HAS_SINKS=sinks_H is not None,
        HAS_SCALES=scales is not None and not is_nvfp4, IS_NVFP4=is_nvfp4,
        HAS_CHUNKS=params.has_chunks, CAP_LOG2=cap_log2(params),
        num_warps=c.num_warps, num_stages=c.num_stages, **launch_options(q_THD),
    )  # fmt: skip
