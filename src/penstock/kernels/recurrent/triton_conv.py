"""The short causal convolution: one launch for decodes, one for drafts, one for longer entries.

Legend: T tokens, N entries, S slots, C channels, X columns of the input, W taps, P = W - 1.
"""

import math

import torch
import triton
import triton.language as tl

from penstock.kernels.launch import jit
from penstock.kernels.op import arch
from penstock.kernels.pdl import launch_options, let_next_start, wait_for_previous
from penstock.kernels.recurrent.reference import causal_conv, keep_conv
from penstock.kernels.recurrent.triton_tiles import block_of_entries, max_tiles, tile_of
from penstock.kernels.sizes import cdiv
from penstock.kernels.triton_math import silu

# An H200, 1024 tokens of 8192 channels: 16 us. More of either in a program took 19 to 24.
_TILE = 32  # tokens of a program; at least P, so that only an entry's first tile needs its past
_BLOCK_C = 128
_TILE_DRAFTED = 4  # a last token and its drafts; P as well
_VECTOR = 16  # columns whose neighborhood a program makes use of
_BLOCK_C_DECODE = 256


@triton.jit
def _renew(
    state_ptr, x_ptr, stride_x, num_tokens, oldest, cols, C: tl.constexpr, P: tl.constexpr
):  # fmt: skip
    """The slot gets the last P of its inputs from position `oldest` on and of `num_tokens` new
    ones. A row is read before the one that overwrites it is written."""
    for p in tl.static_range(P):
        kept = num_tokens + (p - P)
        num_new = tl.where(kept >= 0, C, 0)
        num_old = tl.where((kept < 0) & (kept >= oldest), C, 0)
        new = tl.load(x_ptr + kept.to(tl.int64) * stride_x, mask=cols < num_new, other=0.0)
        old = tl.load(state_ptr + (kept + P) * C, mask=cols < num_old, other=0.0)
        tl.store(state_ptr + p * C, tl.where(kept >= 0, new, old), mask=cols < C)


@jit(do_not_specialize=["first_entry", "num_entries"])
def _causal_conv(
    x_ptr, columns_ptr, weight_ptr, state_ptr, slots_ptr, has_state_ptr, starts_ptr, y_ptr,
    first_entry, num_entries, stride_x,
    C: tl.constexpr, W: tl.constexpr, RUN: tl.constexpr, TILE: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr, KEEPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y[t, c] = silu(sum over w of weight[c, w] * x[t + w - P, columns[c]]).

    Program (i, b): the i-th tile, for the b-th block of channels. That of an entry's first tile
    also renews the slot, if it KEEPS what it has read: nobody else reads it.
    """
    let_next_start(PDL)
    cols = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    in_row = cols < C
    source = tl.load(columns_ptr + cols, mask=in_row, other=0)
    source = tl.max_contiguous(tl.multiple_of(source, RUN), RUN)  # a few columns in one load
    wait_for_previous(PDL)
    if TILE == 1:
        entry, tile = first_entry + tl.program_id(0), 0
    else:
        entry, tile = tile_of(tl.program_id(0), starts_ptr, first_entry, num_entries, TILE, BLOCK_N)
    if entry >= first_entry + num_entries:
        return
    start = tl.load(starts_ptr + entry)
    num_tokens = tl.load(starts_ptr + entry + 1) - start
    P: tl.constexpr = W - 1
    oldest = tl.where(tl.load(has_state_ptr + entry), -P, 0)  # positions from here on are known
    state_ptr += tl.load(slots_ptr + entry).to(tl.int64) * (P * C) + cols
    x_ptr += start.to(tl.int64) * stride_x + source

    positions = tile * TILE + tl.arange(0, TILE)
    inside = (positions < num_tokens)[:, None] & in_row[None, :]
    y = tl.zeros((TILE, BLOCK_C), tl.float32)
    for tap in tl.static_range(W):
        at = (positions + (tap - P))[:, None]
        x = tl.load(x_ptr[None, :] + at.to(tl.int64) * stride_x, mask=inside & (at >= 0), other=0.0)
        weight = tl.load(weight_ptr + cols * W + tap, mask=in_row, other=0.0).to(tl.float32)
        y += x.to(tl.float32) * weight[None, :]
    if tile == 0:
        for tap in tl.static_range(P):
            at = (positions + (tap - P))[:, None]
            is_past = inside & (at < 0) & (at >= oldest)
            past = tl.load(state_ptr[None, :] + (at + P) * C, mask=is_past, other=0.0)
            weight = tl.load(weight_ptr + cols * W + tap, mask=in_row, other=0.0).to(tl.float32)
            y += past.to(tl.float32) * weight[None, :]
    y = silu(y)
    rows = (start + positions).to(tl.int64)[:, None]
    tl.store(y_ptr + rows * C + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=inside)

    if not KEEPS:
        return
    if tile == 0:
        tl.debug_barrier()  # all threads have read the past
        _renew(state_ptr, x_ptr, stride_x, num_tokens, oldest, cols, C, P)


@jit(do_not_specialize=["first_entry"])
def _keep_conv(
    x_ptr, columns_ptr, state_ptr, slots_ptr, starts_ptr, counts_ptr, first_entry, stride_x,
    C: tl.constexpr, P: tl.constexpr, RUN: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (b, n): the b-th block of channels of entry first_entry + n."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    entry = first_entry + tl.program_id(1)
    start = tl.load(starts_ptr + entry)
    num_tokens = tl.load(starts_ptr + entry + 1) - start
    if num_tokens <= 0:
        return
    cols = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    source = tl.load(columns_ptr + cols, mask=cols < C, other=0)
    source = tl.max_contiguous(tl.multiple_of(source, RUN), RUN)
    state_ptr += tl.load(slots_ptr + entry).to(tl.int64) * (P * C) + cols
    x_ptr += start.to(tl.int64) * stride_x + source
    num_tokens = tl.minimum(num_tokens, tl.load(counts_ptr + entry).to(tl.int32))
    _renew(state_ptr, x_ptr, stride_x, num_tokens, -P, cols, C, P)


@causal_conv.impl("triton", needs=arch(80))
def causal_conv_triton(
    x_TX,
    columns_C,
    run,
    weight_CW,
    state_SPC,
    slots_N,
    has_state_N,
    query_starts_N1,
    num_decodes,
    num_drafted=0,
):
    num_channels, width = weight_CW.shape
    assert x_TX.stride(1) == 1 and weight_CW.is_contiguous() and state_SPC.is_contiguous()
    assert state_SPC.shape[1:] == (width - 1, num_channels) and width - 1 <= _TILE, state_SPC.shape
    num_tokens, num_entries = x_TX.shape[0], slots_N.shape[0]
    y_TC = torch.empty((num_tokens, num_channels), dtype=x_TX.dtype, device=x_TX.device)

    def launch(first_entry: int, num_entries: int, tile: int, block: int, keeps: bool) -> None:
        num_tiles = num_entries
        if tile > 1:
            num_tiles = max_tiles(num_tokens - num_decodes, num_entries, tile)
        _causal_conv[(num_tiles, cdiv(num_channels, block))](
            x_TX, columns_C, weight_CW, state_SPC, slots_N, has_state_N, query_starts_N1, y_TC,
            first_entry, num_entries, x_TX.stride(0), C=num_channels, W=width,
            RUN=math.gcd(run, _VECTOR), TILE=tile, BLOCK_C=block,
            BLOCK_N=block_of_entries(num_entries) if tile > 1 else 1, KEEPS=keeps,
            num_warps=4, **launch_options(x_TX),
        )  # fmt: skip

    if num_decodes:
        launch(0, num_decodes, 1, _BLOCK_C_DECODE, True)
    if num_drafted:
        assert width - 1 <= _TILE_DRAFTED, width
        launch(num_decodes, num_drafted, _TILE_DRAFTED, _BLOCK_C_DECODE, False)
    first_longer = num_decodes + num_drafted
    if num_longer := num_entries - first_longer:
        launch(first_longer, num_longer, _TILE, _BLOCK_C, True)
    return y_TC


@keep_conv.impl("triton", needs=arch(80))
def keep_conv_triton(
    x_TX,
    columns_C,
    run,
    state_SPC,
    slots_N,
    query_starts_N1,
    counts_N,
    num_decodes,
    num_drafted,
):
    _, num_past, num_channels = state_SPC.shape
    assert x_TX.stride(1) == 1 and state_SPC.is_contiguous()
    _keep_conv[(cdiv(num_channels, _BLOCK_C_DECODE), num_drafted)](
        x_TX, columns_C, state_SPC, slots_N, query_starts_N1, counts_N, num_decodes,
        x_TX.stride(0), C=num_channels, P=num_past, RUN=math.gcd(run, _VECTOR),
        BLOCK_C=_BLOCK_C_DECODE, num_warps=4, **launch_options(x_TX),
    )  # fmt: skip
