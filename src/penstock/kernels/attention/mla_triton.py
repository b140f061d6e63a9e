"""Multi-head latent attention on a GPU: one launch per op, two where a decode's keys are split.

Decodes read each cached vector once for a tile of heads, and how they split keys is told in
`triton_decode`. Prompts are attended as in `triton_prefill`, on keys and values that lie one after
the other, and fold the result into what they find.

Legend: T tokens, N entries, H heads, C latent size, R rotated channels, F = R / 2, A = C + R,
D other channels of a head's query and key, V value size, E = D + V, L keys, P positions, B blocks,
S tokens per block.
"""

import functools
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from penstock.kernels.attention.mla import mla_attend, mla_decode, mla_project, mla_write
from penstock.kernels.attention.triton_decode import (
    LN_2,
    LOG2_E,
    NO_WINDOW,
    Load,
    load_of,
    reduce_splits,
    span,
)
from penstock.kernels.attention.triton_prefill import num_slots, tile_of
from penstock.kernels.device import shared_bytes
from penstock.kernels.launch import jit
from penstock.kernels.op import arch
from penstock.kernels.pdl import launch_options, let_next_start, wait_for_previous
from penstock.kernels.sizes import cdiv, next_power_of_2
from penstock.kernels.triton_dtypes import TRITON_DTYPES
from penstock.kernels.triton_math import dot, fp8_clamp

# Heads that one program rotates. An H200, 1024 tokens of 128 heads: 8.3 us, with 16 each 11.6.
_HEADS, _HEADS_OF_MANY = 16, 32
_MANY_TOKENS = 256


@triton.jit
def _rotated(
    x_ptr, inside, table_ptr, position, f, F: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Both halves of the rotated channels of rows, in fp32. `f` is a row of F channels, `inside`
    says which rows there are."""
    if INTERLEAVED:  # both of a pair in one load
        ROWS: tl.constexpr = x_ptr.shape[0]
        BLOCK_F: tl.constexpr = f.shape[1]
        both = tl.arange(0, 2 * BLOCK_F)[None, :]
        x = tl.load(x_ptr + both, mask=inside & (both < 2 * F), other=0.0)
        first, second = tl.split(tl.reshape(x.to(tl.float32), (ROWS, BLOCK_F, 2)))
    else:
        inside = inside & (f < F)
        first = tl.load(x_ptr + f, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(x_ptr + F + f, mask=inside, other=0.0).to(tl.float32)
    cos = tl.load(table_ptr + position * (2 * F) + f, mask=f < F, other=1.0)
    sin = tl.load(table_ptr + position * (2 * F) + F + f, mask=f < F, other=0.0)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _store_cached(kv_ptr, cache_ptr, cols, x, mask):
    """The same number, rounded to the model's dtype, for this step and for the cache."""
    x = x.to(kv_ptr.dtype.element_ty)
    tl.store(kv_ptr + cols, x, mask=mask)
    x = x.to(tl.float32)
    if cache_ptr.dtype.element_ty.primitive_bitwidth == 8:
        x = fp8_clamp(x)
    tl.store(cache_ptr + cols, x.to(cache_ptr.dtype.element_ty), mask=mask)


@jit
def _mla_write(
    q_ptr, kv_ptr, weight_ptr, eps, table_ptr, positions_ptr, slots_ptr,
    q_out_ptr, kv_out_ptr, cache_ptr, stride_qt, stride_qh, stride_kv,
    H: tl.constexpr, C: tl.constexpr, F: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_F: tl.constexpr, HEADS: tl.constexpr, INTERLEAVED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (t, 0) has the latent and the key of token t, (t, i) the i-th group of its heads."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    position = tl.load(positions_ptr + token)
    A: tl.constexpr = C + 2 * F
    if group == 0:
        kv_ptr += token * stride_kv
        kv_out_ptr += token * A
        cache_ptr += tl.load(slots_ptr + token) * A
        cols = tl.arange(0, BLOCK_C)
        x = tl.load(kv_ptr + cols, mask=cols < C, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + cols, mask=cols < C, other=0.0).to(tl.float32)
        x = x * tl.rsqrt(tl.sum(x * x, axis=0) / C + eps) * weight
        _store_cached(kv_out_ptr, cache_ptr, cols, x, cols < C)
        f = tl.arange(0, BLOCK_F)[None, :]
        row = tl.arange(0, 1)[:, None]
        first, second = _rotated(kv_ptr + C + row, row == 0, table_ptr, position, f, F, INTERLEAVED)
        _store_cached(kv_out_ptr, cache_ptr, C + f, first, f < F)
        _store_cached(kv_out_ptr, cache_ptr, C + F + f, second, f < F)
    else:
        heads = ((group - 1) * HEADS + tl.arange(0, HEADS))[:, None]
        pairs = tl.arange(0, BLOCK_F)[None, :]
        inside = (heads < H) & (pairs < F)
        q_at = q_ptr + token * stride_qt + heads * stride_qh
        q_first, q_second = _rotated(q_at, heads < H, table_ptr, position, pairs, F, INTERLEAVED)
        to = q_out_ptr + (token * H + heads) * (2 * F) + pairs
        tl.store(to, q_first.to(q_out_ptr.dtype.element_ty), mask=inside)
        tl.store(to + F, q_second.to(q_out_ptr.dtype.element_ty), mask=inside)


@mla_write.impl("triton", needs=arch(80))
def mla_write_triton(
    q_THR, kv_TA, weight_C, eps, cos_sin_PR, positions_T, cache_BSA, slots_T, is_interleaved
):
    num_tokens, num_heads, rotary = q_THR.shape
    assert q_THR.stride(2) == kv_TA.stride(1) == 1 and cache_BSA.is_contiguous()
    assert cos_sin_PR.shape[1] == rotary and kv_TA.shape[1] == len(weight_C) + rotary
    q_out_THR = torch.empty(q_THR.shape, dtype=q_THR.dtype, device=q_THR.device)
    kv_out_TA = torch.empty(kv_TA.shape, dtype=kv_TA.dtype, device=kv_TA.device)
    if num_tokens:
        heads = _HEADS if num_tokens < _MANY_TOKENS else _HEADS_OF_MANY
        _mla_write[(num_tokens, 1 + cdiv(num_heads, heads))](
            q_THR, kv_TA, weight_C, eps, cos_sin_PR, positions_T, slots_T,
            q_out_THR, kv_out_TA, cache_BSA, q_THR.stride(0), q_THR.stride(1), kv_TA.stride(0),
            H=num_heads, C=len(weight_C), F=rotary // 2,
            BLOCK_C=next_power_of_2(len(weight_C)),
            BLOCK_F=next_power_of_2(rotary // 2), HEADS=heads, INTERLEAVED=is_interleaved,
            num_warps=2, **launch_options(q_THR),
        )  # fmt: skip
    return q_out_THR, kv_out_TA


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Launch config. Only `tile`, `min_span` and `max_splits` touch the arithmetic."""

    heads: int  # of one program
    num_warps: int
    tile: int = 32  # keys read at once
    num_stages: int = 2
    min_span: int = 128  # keys a split has at least; a multiple of tile
    max_splits: int = 64
    programs: int = 1024  # that share the splits; 1: nothing is split


@functools.cache
def decode_config(num_heads: int, element_bytes: int, num_entries: int) -> DecodeConfig:
    """Partial results are large, as wide as the latent for every head: 0.3 GiB at most."""
    if element_bytes > 2:  # no tensor cores in full precision
        usual = DecodeConfig(heads=16, num_warps=4, tile=16)
    elif num_heads <= 16:
        usual = DecodeConfig(heads=16, num_warps=4)
    elif num_heads <= 32 or shared_bytes() < 112 << 10:  # what 64 take: not sm_86, sm_89, sm_120
        usual = DecodeConfig(heads=32, num_warps=4)
    else:
        usual = DecodeConfig(heads=64, num_warps=8)
    if load_of(num_entries * cdiv(num_heads, usual.heads), NO_WINDOW) >= Load.FEW_WAVES:
        return replace(usual, programs=1)
    return usual if num_entries <= 16 else replace(usual, max_splits=8)


@triton.jit
def _attend_latents(
    q, q_rot, cache_ptr, table_ptr, first_key, end_key, scale_log2,
    S: tl.constexpr, C: tl.constexpr, R: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, TILE: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """Running maximum m, sum total and weighted latents acc of the keys [first_key, end_key)."""
    cols = tl.arange(0, BLOCK_C)[None, :]
    rot_cols = tl.arange(0, BLOCK_R)[None, :]
    m = tl.full((HEADS,), -float("inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    acc = tl.zeros((HEADS, BLOCK_C), tl.float32)
    for start in tl.range(first_key, end_key, TILE):
        keys = start + tl.arange(0, TILE)
        inside = keys < end_key
        block = tl.load(table_ptr + keys // S, mask=inside, other=0).to(tl.int64)
        at = cache_ptr + ((block * S + keys % S) * (C + R))[:, None]
        latent = tl.load(at + cols, mask=inside[:, None] & (cols < C), other=0.0).to(q.dtype)
        rot_mask = inside[:, None] & (rot_cols < R)
        rot = tl.load(at + C + rot_cols, mask=rot_mask, other=0.0).to(q.dtype)
        scores = dot(q, tl.trans(latent), tl.zeros((HEADS, TILE), tl.float32), ON_GPU)
        scores = dot(q_rot, tl.trans(rot), scores, ON_GPU) * scale_log2
        scores = tl.where(inside[None, :], scores, -float("inf"))
        m_new = tl.maximum(m, tl.max(scores, axis=1))
        alpha = tl.exp2(m - m_new)
        p = tl.exp2(scores - m_new[:, None])
        total = total * alpha + tl.sum(p, axis=1)
        acc = dot(p.to(q.dtype), latent, acc * alpha[:, None], ON_GPU)
        m = m_new
    return m, total, acc


@jit
def _mla_decode(
    q_ptr, q_rot_ptr, cache_ptr, out_ptr, out_lse_ptr, partial_ptr, lse_ptr, rows_ptr, kv_lens_ptr,
    table_ptr, scale_log2, stride_qn, stride_qh, stride_rn, stride_rh, stride_table,
    H: tl.constexpr, C: tl.constexpr, R: tl.constexpr, S: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, TILE: tl.constexpr, MIN_SPAN: tl.constexpr,
    SPLITS: tl.constexpr, DIRECT: tl.constexpr, GIVES_LSE: tl.constexpr, ON_GPU: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (p, g, n) of P takes splits p, p + P, ... of entry n for the g-th group of heads.

    DIRECT: P is 1, writes out[n] itself, GIVES_LSE: and its log-sum-exp. Else partial[n, h, split]
    and its log2-sum-exp.
    """
    let_next_start(PDL)
    wait_for_previous(PDL)
    entry = tl.program_id(2).to(tl.int64)
    kv_len = tl.load(kv_lens_ptr + entry)
    if (kv_len == 0) & (DIRECT and not GIVES_LSE):  # what it gives may be anything
        return
    table_ptr += tl.load(rows_ptr + entry).to(tl.int64) * stride_table
    h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    heads = h[:, None]
    cols = tl.arange(0, BLOCK_C)[None, :]
    rot_cols = tl.arange(0, BLOCK_R)[None, :]
    inside = (heads < H) & (cols < C)
    q_at = q_ptr + entry * stride_qn + heads * stride_qh + cols
    q = tl.load(q_at, mask=inside, other=0.0)
    rot_at = q_rot_ptr + entry * stride_rn + heads * stride_rh + rot_cols
    q_rot = tl.load(rot_at, mask=(heads < H) & (rot_cols < R), other=0.0)
    if DIRECT:
        m, total, acc = _attend_latents(
            q, q_rot, cache_ptr, table_ptr, 0, kv_len, scale_log2,
            S, C, R, HEADS, BLOCK_C, BLOCK_R, TILE, ON_GPU,
        )  # fmt: skip
        out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + (entry * H + heads) * C + cols, out, mask=inside)
        if GIVES_LSE:
            tl.store(out_lse_ptr + entry * H + h, (m + tl.log2(total)) * LN_2, mask=h < H)
    else:
        keys_each = span(kv_len, SPLITS, MIN_SPAN, TILE)
        num_splits = tl.cdiv(kv_len, keys_each)
        for split in range(tl.program_id(0), num_splits, tl.num_programs(0)):
            start = split * keys_each
            m, total, acc = _attend_latents(
                q, q_rot, cache_ptr, table_ptr, start, tl.minimum(start + keys_each, kv_len),
                scale_log2, S, C, R, HEADS, BLOCK_C, BLOCK_R, TILE, ON_GPU,
            )  # fmt: skip
            at = (entry * H + h) * SPLITS + split
            tl.store(partial_ptr + at[:, None] * C + cols, acc / total[:, None], mask=inside)
            tl.store(lse_ptr + at, m + tl.log2(total), mask=h < H)


@mla_decode.impl("triton", needs=arch(80))
def mla_decode_triton(
    q_NHC, q_NHR, cache_BSA, rows_N, kv_lens_N, block_table_RM, scale, max_kv_len, lse_NH=None
):
    num_entries, num_heads, size = q_NHC.shape
    rotary = q_NHR.shape[2]
    assert q_NHC.stride(2) == q_NHR.stride(2) == 1 and cache_BSA.is_contiguous()
    assert cache_BSA.shape[2] == size + rotary, (cache_BSA.shape, size, rotary)
    c = decode_config(num_heads, q_NHC.element_size(), num_entries)
    num_groups = cdiv(num_heads, c.heads)
    programs = min(
        c.max_splits,
        cdiv(max_kv_len, c.min_span),
        max(1, c.programs // (num_entries * num_groups)),
    )
    block_c, device = next_power_of_2(size), q_NHC.device
    out_NHC = torch.empty((num_entries, num_heads, size), dtype=q_NHC.dtype, device=device)
    partial, lse = out_NHC, out_NHC  # not used by a single program
    gives_lse, out_lse = lse_NH is not None, out_NHC if lse_NH is None else lse_NH
    if programs > 1:
        shape = (num_entries, num_heads, c.max_splits)
        partial = torch.empty((*shape, size), dtype=torch.float32, device=device)
        lse = torch.empty(shape, dtype=torch.float32, device=device)
    _mla_decode[(programs, num_groups, num_entries)](
        q_NHC, q_NHR, cache_BSA, out_NHC, out_lse, partial, lse, rows_N, kv_lens_N, block_table_RM,
        scale * LOG2_E, q_NHC.stride(0), q_NHC.stride(1), q_NHR.stride(0), q_NHR.stride(1),
        block_table_RM.stride(0),
        H=num_heads, C=size, R=rotary, S=cache_BSA.shape[1], HEADS=c.heads, BLOCK_C=block_c,
        BLOCK_R=max(16, next_power_of_2(rotary)), TILE=c.tile, MIN_SPAN=c.min_span,
        SPLITS=c.max_splits, DIRECT=programs == 1, GIVES_LSE=gives_lse, ON_GPU=q_NHC.is_cuda,
        num_warps=c.num_warps, num_stages=c.num_stages, **launch_options(q_NHC),
    )  # fmt: skip
    if programs > 1:
        block = min(block_c, 128)
        reduce_splits[(num_heads, num_entries, cdiv(size, block))](
            partial, lse, out_NHC, out_lse, kv_lens_N, None, kv_lens_N, None, NO_WINDOW,
            dtype=TRITON_DTYPES[out_NHC.dtype], H=num_heads, D=size, BLOCK_D=block, Q=1,
            TILE=c.tile, MIN_SPAN=c.min_span, SPLITS=c.max_splits, HAS_SINKS=False,
            IS_ONE_DONE=False, HAS_CHUNKS=False, GIVES_LSE=gives_lse, num_warps=4,
            **launch_options(q_NHC),
        )  # fmt: skip
    return out_NHC


@dataclass(frozen=True, slots=True)
class ProjectConfig:
    """Launch config. An H200, 1024 tokens of 128 heads: 2.2 us when none of them sees anything; all
    of them 76 us to a latent of 512 and 56 us from there, with eight warps 107 and 54."""

    rows: int = 128  # tokens of one program, for all outputs of a head
    outputs: int = 128
    inputs: int = 64  # that are read at once
    num_warps: int = 4
    num_stages: int = 3


def project_config(element_bytes: int) -> ProjectConfig:
    if element_bytes > 2:  # no tensor cores in full precision
        return ProjectConfig(rows=32, outputs=32, inputs=16, num_stages=2)
    return ProjectConfig(num_stages=3 if shared_bytes() >= 120 << 10 else 2)


@jit(do_not_specialize=["num_tokens"])
def _mla_project(
    x_ptr, weight_ptr, kv_lens_ptr, out_ptr, num_tokens,
    stride_xt, stride_xh, stride_wh, stride_wo, stride_wi, stride_ot, stride_oh,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr, BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr, ON_GPU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, h): the i-th tile of tokens for head h; nothing where none of them is meant."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    tokens = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_meant = tl.load(kv_lens_ptr + tokens, mask=tokens < num_tokens, other=0) > 0
    if tl.sum(is_meant.to(tl.int32)) == 0:
        return
    head = tl.program_id(1).to(tl.int64)
    tokens = tokens.to(tl.int64)[:, None]
    inputs = tl.arange(0, BLOCK_I)
    x_ptr += tokens * stride_xt + head * stride_xh + inputs[None, :]
    weight_ptr += head * stride_wh + inputs[:, None] * stride_wi
    for first_output in range(0, OUTPUTS, BLOCK_O):
        outputs = (first_output + tl.arange(0, BLOCK_O))[None, :]
        acc = tl.zeros((ROWS, BLOCK_O), tl.float32)
        for first in range(0, INPUTS, BLOCK_I):
            is_input = first + inputs < INPUTS
            x = tl.load(x_ptr + first, mask=is_meant[:, None] & is_input[None, :], other=0.0)
            weight = tl.load(
                weight_ptr + first * stride_wi + outputs * stride_wo,
                mask=is_input[:, None] & (outputs < OUTPUTS),
                other=0.0,
            )
            acc = dot(x, weight, acc, ON_GPU)
        at = tokens * stride_ot + head * stride_oh + outputs
        out = acc.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + at, out, mask=is_meant[:, None] & (outputs < OUTPUTS))


@mla_project.impl("triton", needs=arch(80))
def mla_project_triton(x_THI, weight_HOI, kv_lens_T, out_THO):
    num_tokens, num_heads, num_inputs = x_THI.shape
    assert x_THI.stride(2) == out_THO.stride(2) == 1 and weight_HOI.dtype == x_THI.dtype
    c = project_config(x_THI.element_size())
    _mla_project[(cdiv(num_tokens, c.rows), num_heads)](
        x_THI, weight_HOI, kv_lens_T, out_THO, num_tokens, x_THI.stride(0), x_THI.stride(1),
        *weight_HOI.stride(), out_THO.stride(0), out_THO.stride(1),
        INPUTS=num_inputs, OUTPUTS=out_THO.shape[2], ROWS=c.rows, BLOCK_O=c.outputs,
        BLOCK_I=c.inputs, ON_GPU=x_THI.is_cuda, num_warps=c.num_warps, num_stages=c.num_stages,
        **launch_options(x_THI),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class AttendConfig:
    """Launch config. An H200, 128 heads: a prompt of 1024 tokens 161 us, two of 500 and one of 24
    110 us; with 128 rows, eight warps and three stages 168 and 127."""

    rows: int = 64  # queries of one program
    tile: int = 64  # keys read at once
    num_warps: int = 4
    num_stages: int = 2


def attend_config(element_bytes: int) -> AttendConfig:
    if element_bytes > 2:  # no tensor cores in full precision
        return AttendConfig(rows=32, tile=16)
    return AttendConfig()


@triton.jit
def _attend_keys(
    q, q_rot, m, total, acc, places, kv_ptr, rot_ptr, first_key, end_key, scale_log2,
    stride_l, stride_r,
    D: tl.constexpr, R: tl.constexpr, V: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    MASKED: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """Take the keys [first_key, end_key) into every row's running maximum, total and values.

    MASKED: a row sees those up to its place. Else whole tiles that every row sees.
    """
    cols, rot_cols = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_R)[None, :]
    v_cols = tl.arange(0, BLOCK_V)[None, :]
    for start in tl.range(first_key, end_key, TILE):
        keys = start + tl.arange(0, TILE)
        inside = (keys < end_key)[:, None]
        at = keys.to(tl.int64)[:, None]
        k = tl.load(kv_ptr + at * stride_l + cols, mask=inside & (cols < D), other=0.0)
        rot_mask = inside & (rot_cols < R)
        rot = tl.load(rot_ptr + at * stride_r + rot_cols, mask=rot_mask, other=0.0)
        v = tl.load(kv_ptr + at * stride_l + D + v_cols, mask=inside & (v_cols < V), other=0.0)
        scores = dot(q, tl.trans(k), tl.zeros((ROWS, TILE), tl.float32), ON_GPU)
        scores = dot(q_rot, tl.trans(rot), scores, ON_GPU) * scale_log2
        if MASKED:
            seen = (keys[None, :] <= places[:, None]) & (keys < end_key)[None, :]
            scores = tl.where(seen, scores, -float("inf"))
        m_new = tl.maximum(m, tl.max(scores, axis=1))
        alpha = tl.exp2(m - m_new)
        p = tl.exp2(scores - m_new[:, None])
        total = total * alpha + tl.sum(p, axis=1)
        acc = dot(p.to(v.dtype), v, acc * alpha[:, None], ON_GPU)
        m = m_new
    return m, total, acc


@jit(
    do_not_specialize=["num_entries"],
    do_not_specialize_on_alignment=["query_starts_ptr", "key_starts_ptr"],
)
def _mla_attend(
    q_ptr, q_rot_ptr, kv_ptr, rot_ptr, query_starts_ptr, key_starts_ptr, out_ptr, lse_ptr,
    num_entries, scale_log2, stride_qt, stride_qh, stride_rt, stride_rh, stride_l, stride_r,
    H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, V: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    CAUSAL: tl.constexpr, MERGES: tl.constexpr, ON_GPU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, h): the i-th last slot (`triton_prefill.tile_of`), for head h.

    Every row sees the first key of its entry, so no maximum stays infinite.
    """
    let_next_start(PDL)
    wait_for_previous(PDL)
    head, slot = tl.program_id(1), tl.num_programs(0) - 1 - tl.program_id(0)
    entry, tile = tile_of(slot, query_starts_ptr, 0, num_entries, 1, ROWS)
    first_query = tl.load(query_starts_ptr + entry)
    num_queries = tl.load(query_starts_ptr + entry + 1) - first_query
    first_key = tl.load(key_starts_ptr + entry).to(tl.int64)
    num_keys = (tl.load(key_starts_ptr + entry + 1) - first_key).to(tl.int32)
    if (tile * ROWS >= num_queries) | (num_keys == 0):
        return
    places = tile * ROWS + tl.arange(0, ROWS)
    is_query = (places < num_queries)[:, None]
    tokens = (first_query + places).to(tl.int64)[:, None]
    cols, rot_cols = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_R)[None, :]
    v_cols = tl.arange(0, BLOCK_V)[None, :]
    q_at = q_ptr + tokens * stride_qt + head * stride_qh + cols
    q = tl.load(q_at, mask=is_query & (cols < D), other=0.0)
    rot_at = q_rot_ptr + tokens * stride_rt + head * stride_rh + rot_cols
    q_rot = tl.load(rot_at, mask=is_query & (rot_cols < R), other=0.0)
    kv_ptr += first_key * stride_l + head * (D + V)
    rot_ptr += first_key * stride_r

    if CAUSAL:
        end_key = tl.minimum((tile + 1) * ROWS, num_queries)
        masked_from = (tile * ROWS + 1) // TILE * TILE
    else:
        places = tl.full((ROWS,), 1 << 30, tl.int32)
        end_key = num_keys
        masked_from = num_keys // TILE * TILE
    m = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, BLOCK_V), tl.float32)
    m, total, acc = _attend_keys(
        q, q_rot, m, total, acc, places, kv_ptr, rot_ptr, 0, masked_from, scale_log2, stride_l,
        stride_r, D, R, V, BLOCK_D, BLOCK_R, BLOCK_V, ROWS, TILE, False, ON_GPU,
    )  # fmt: skip
    m, total, acc = _attend_keys(
        q, q_rot, m, total, acc, places, kv_ptr, rot_ptr, masked_from, end_key, scale_log2,
        stride_l, stride_r, D, R, V, BLOCK_D, BLOCK_R, BLOCK_V, ROWS, TILE, True, ON_GPU,
    )  # fmt: skip
    acc = acc / total[:, None]
    lse = ((m + tl.log2(total)) * LN_2)[:, None]
    lse_at = lse_ptr + tokens * H + head
    out_at = out_ptr + (tokens * H + head) * V + v_cols
    inside = is_query & (v_cols < V)
    if MERGES:
        old_lse = tl.load(lse_at, mask=is_query, other=0.0)
        old = tl.load(out_at, mask=inside, other=0.0).to(tl.float32)
        top = tl.maximum(old_lse, lse)
        old_weight, new_weight = tl.exp(old_lse - top), tl.exp(lse - top)
        both = old_weight + new_weight
        acc = (old * old_weight + acc * new_weight) / both
        lse = top + tl.log(both)
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(lse_at, lse, mask=is_query)


@mla_attend.impl("triton", needs=arch(80))
def mla_attend_triton(
    q_THD,
    q_THR,
    kv_LHE,
    key_LR,
    query_starts_N1,
    key_starts_N1,
    out_THV,
    lse_TH,
    scale,
    is_causal,
    merges,
):
    _, num_heads, size = q_THD.shape
    value_size, rotary = out_THV.shape[2], q_THR.shape[2]
    assert q_THD.stride(2) == q_THR.stride(2) == key_LR.stride(1) == 1
    assert kv_LHE.is_contiguous() and kv_LHE.shape[2] == size + value_size, kv_LHE.shape
    assert out_THV.is_contiguous() and lse_TH.is_contiguous() and kv_LHE.dtype == q_THD.dtype
    c = attend_config(q_THD.element_size())
    num_entries = len(query_starts_N1) - 1
    _mla_attend[num_slots(len(q_THD), num_entries, 1, c.rows), num_heads](
        q_THD, q_THR, kv_LHE, key_LR, query_starts_N1, key_starts_N1, out_THV, lse_TH,
        num_entries, scale * LOG2_E, q_THD.stride(0), q_THD.stride(1), q_THR.stride(0),
        q_THR.stride(1), kv_LHE.stride(0), key_LR.stride(0),
        H=num_heads, D=size, R=rotary, V=value_size,
        BLOCK_D=max(16, next_power_of_2(size)),
        BLOCK_R=max(16, next_power_of_2(rotary)),
        BLOCK_V=max(16, next_power_of_2(value_size)), ROWS=c.rows, TILE=c.tile,
        CAUSAL=is_causal, MERGES=merges, ON_GPU=q_THD.is_cuda, num_warps=c.num_warps,
        num_stages=c.num_stages, **launch_options(q_THD),
    )  # fmt: skip
