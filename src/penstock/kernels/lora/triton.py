"""Low-rank adapters on a GPU: two launches, shrink (x times A) and expand (that times B, onto y).

Slots and ranks are read on the device and launch grids follow from the number of tokens alone, so
a CUDA graph serves any mix of adapters. Single tokens are GEMVs as fast as their matrices can be
read, which a few of one adapter share; tokens of prompts, which come in runs of one adapter, are
tiles on tensor cores.

Legend: T tokens, I inputs, O outputs, S slots, P parts of the outputs, R largest rank, G tokens of
a group, N splits of the inputs.
"""

import functools

import torch
import triton
import triton.language as tl

from penstock.kernels.device import num_sms
from penstock.kernels.launch import jit
from penstock.kernels.lora.reference import lora, lora_groups
from penstock.kernels.op import arch
from penstock.kernels.pdl import launch_options, let_next_start, wait_for_previous
from penstock.kernels.sizes import cdiv, next_power_of_2
from penstock.kernels.triton_dtypes import TRITON_DTYPES
from penstock.kernels.triton_math import dot

_MAX_PARTS = 4
# Of single tokens:
_BLOCK_A = 16384  # numbers of A that a program reads at once, in whole rows where they fit
_BLOCK_O = 512  # outputs of a program: a thread has eight, and all rows of B
_RANKS = 16  # rows of B read at once
_SHRINKS, _EXPANDS = 2, 4  # programs that fit on an SM; each takes item after item
_TILE_T, _TILE_I, _TILE_O = 64, 128, 128
_MAX_SPLITS = 8  # of the inputs of tiles, where tokens and parts are too few programs for all SMs

# Where prompts begin among the slots of a step is not aligned: one kernel for any place.
_jit = functools.partial(
    jit,
    do_not_specialize=["num_tokens", "num_splits"],
    do_not_specialize_on_alignment=["slots_ptr"],
)


@triton.jit
def _part_of(block, n0, n1, n2, n3, BLOCK: tl.constexpr):
    """(part, first output of the layer, outputs) of a block; no block lies in two parts."""
    f1 = tl.cdiv(n0, BLOCK)
    f2 = f1 + tl.cdiv(n1, BLOCK)
    f3 = f2 + tl.cdiv(n2, BLOCK)
    part = (block >= f1).to(tl.int32) + (block >= f2).to(tl.int32) + (block >= f3).to(tl.int32)
    size = tl.where(part == 0, n0, tl.where(part == 1, n1, tl.where(part == 2, n2, n3)))
    first = tl.where(part == 0, 0, tl.where(part == 1, f1, tl.where(part == 2, f2, f3)))
    begin = tl.where(
        part == 0, 0, tl.where(part == 1, n0, tl.where(part == 2, n0 + n1, n0 + n1 + n2))
    )
    inside = (block - first) * BLOCK
    return part, begin + inside, tl.minimum(size - inside, BLOCK)


@jit(do_not_specialize=["num_tokens"])
def _groups(slots_ptr, groups_ptr, num_tokens, G: tl.constexpr, BLOCK: tl.constexpr):
    """groups[n] as in `lora_groups`; one program per token."""
    token = tl.program_id(0)
    slot = tl.load(slots_ptr + token)
    places = tl.arange(0, G)
    group = tl.full((G,), -1, tl.int32)
    if slot >= 0:
        place = 0
        for start in range(0, token, BLOCK):
            at = start + tl.arange(0, BLOCK)
            others = tl.load(slots_ptr + at, mask=at < token, other=-1)
            place += tl.sum((others == slot).to(tl.int32), 0)
        if place % G == 0:
            num_found = 0
            for start in range(token, num_tokens, BLOCK):
                at = start + tl.arange(0, BLOCK)
                others = tl.load(slots_ptr + at, mask=at < num_tokens, other=-1)
                is_same = (others == slot).to(tl.int32)
                numbers = num_found + tl.cumsum(is_same, 0) - 1
                is_it = (is_same > 0)[None, :] & (numbers[None, :] == places[:, None])
                group = tl.maximum(group, tl.max(tl.where(is_it, at[None, :], -1), 1))
                num_found += tl.sum(is_same, 0)
    tl.store(groups_ptr + token * G + places, group)


@_jit()
def _shrink(
    x_ptr, a_ptr, ranks_ptr, slots_ptr, groups_ptr, v_ptr, stride_x, num_tokens,
    IN: tl.constexpr, P: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, BLOCK_I: tl.constexpr,
    G: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """v[t, p, r] = a[slot, p, r] . x[t]: ROWS rows of a part for one group at a time. Slots and
    groups are as old as the step and need no wait."""
    let_next_start(PDL)
    blocks = P * (R // ROWS)
    inputs = tl.arange(0, BLOCK_I)
    is_input = (inputs < IN)[None, :]
    for item in range(tl.program_id(0), num_tokens * blocks, tl.num_programs(0)):
        first, block = item // blocks, item % blocks
        part, rows = block // (R // ROWS), block % (R // ROWS) * ROWS + tl.arange(0, ROWS)
        is_group = tl.load(groups_ptr + first * G) >= 0
        slot = tl.load(slots_ptr + first, mask=is_group, other=0).to(tl.int64)
        rank = tl.load(ranks_ptr + slot * P + part, mask=is_group, other=0)
        is_row = (rows < rank)[:, None]
        a_rows = a_ptr + ((slot * P + part) * R + rows[:, None]) * IN
        a_first = tl.load(a_rows + inputs[None, :], mask=is_row & is_input, other=0.0)
        wait_for_previous(PDL)
        if block % (R // ROWS) * ROWS < rank:
            for pair in tl.static_range(0, G, 2):
                token0 = tl.load(groups_ptr + first * G + pair).to(tl.int64)
                token1 = tl.load(groups_ptr + first * G + pair + 1).to(tl.int64)
                if token0 >= 0:
                    x0, x1 = x_ptr + token0 * stride_x, x_ptr + token1 * stride_x
                    in1 = tl.where(token1 >= 0, IN, 0)  # the second may be none
                    v0, v1 = _products(a_first, x0, x1, inputs, IN, in1)
                    for start in tl.static_range(BLOCK_I, IN, BLOCK_I):
                        at = start + inputs
                        mask = is_row & (at < IN)[None, :]
                        a = tl.load(a_rows + at[None, :], mask=mask, other=0.0)
                        more0, more1 = _products(a, x0, x1, at, IN, in1)
                        v0 += more0
                        v1 += more1
                    v_rows = v_ptr + part * R + rows
                    tl.store(v_rows + token0 * P * R, v0, mask=rows < rank)
                    rank1 = tl.where(token1 >= 0, rank, 0)
                    tl.store(v_rows + token1 * P * R, v1, mask=rows < rank1)


@triton.jit
def _products(a, x0_ptr, x1_ptr, inputs, in0, in1):
    """a . x of two tokens, whose loads are under way together."""
    x0 = tl.load(x0_ptr + inputs, mask=inputs < in0, other=0.0).to(tl.float32)
    x1 = tl.load(x1_ptr + inputs, mask=inputs < in1, other=0.0).to(tl.float32)
    a = a.to(tl.float32)
    return tl.sum(a * x0[None, :], 1), tl.sum(a * x1[None, :], 1)


@_jit()
def _expand(
    v_ptr, b_ptr, ranks_ptr, slots_ptr, groups_ptr, y_ptr, stride_y, num_tokens, n0, n1, n2, n3,
    OUT: tl.constexpr, P: tl.constexpr, R: tl.constexpr, RANKS: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCKS: tl.constexpr, G: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y[t, o] += sum over r of v[t, p, r] * b[slot, r, o]: a block of outputs for one group at a
    time."""
    let_next_start(PDL)
    outputs, rows = tl.arange(0, BLOCK_O), tl.arange(0, RANKS)
    for item in range(tl.program_id(0), num_tokens * BLOCKS, tl.num_programs(0)):
        first = item // BLOCKS
        part, begin, size = _part_of(item % BLOCKS, n0, n1, n2, n3, BLOCK_O)
        is_group = tl.load(groups_ptr + first * G) >= 0
        slot = tl.load(slots_ptr + first, mask=is_group, other=0).to(tl.int64)
        rank = tl.load(ranks_ptr + slot * P + part, mask=is_group, other=0)
        is_output = outputs < size
        b_ptrs = b_ptr + slot * R * OUT + begin + rows[:, None] * OUT + outputs[None, :]
        mask = (rows < rank)[:, None] & is_output[None, :]
        b_first = tl.load(b_ptrs, mask=mask, other=0.0)
        wait_for_previous(PDL)
        if rank > 0:
            for pair in tl.static_range(0, G, 2):
                token0 = tl.load(groups_ptr + first * G + pair).to(tl.int64)
                token1 = tl.load(groups_ptr + first * G + pair + 1).to(tl.int64)
                if token0 >= 0:
                    rank1 = tl.where(token1 >= 0, rank, 0)  # the second may be none
                    y0_at = y_ptr + token0 * stride_y + begin + outputs
                    y1_at = y_ptr + token1 * stride_y + begin + outputs
                    is_y1 = outputs < tl.where(token1 >= 0, size, 0)
                    y0 = tl.load(y0_at, mask=is_output, other=0.0)
                    y1 = tl.load(y1_at, mask=is_y1, other=0.0)
                    v0_ptr = v_ptr + (token0 * P + part) * R
                    v1_ptr = v_ptr + (token1 * P + part) * R
                    own0, own1 = _sums(b_first, v0_ptr, v1_ptr, rows, rank, rank1)
                    for row in range(RANKS, rank, RANKS):
                        at = row + rows
                        mask = (at < rank)[:, None] & is_output[None, :]
                        b = tl.load(b_ptrs + row * OUT, mask=mask, other=0.0)
                        more0, more1 = _sums(b, v0_ptr, v1_ptr, at, rank, rank1)
                        own0 += more0
                        own1 += more1
                    dtype = y_ptr.dtype.element_ty
                    tl.store(y0_at, (y0.to(tl.float32) + own0).to(dtype), mask=is_output)
                    tl.store(y1_at, (y1.to(tl.float32) + own1).to(dtype), mask=is_y1)


@triton.jit
def _sums(b, v0_ptr, v1_ptr, rows, rank0, rank1):
    """v . b of two tokens, whose loads are under way together."""
    v0 = tl.load(v0_ptr + rows, mask=rows < rank0, other=0.0)
    v1 = tl.load(v1_ptr + rows, mask=rows < rank1, other=0.0)
    b = b.to(tl.float32)
    return tl.sum(b * v0[:, None], 0), tl.sum(b * v1[:, None], 0)


@_jit()
def _shrink_tiles(
    x_ptr, a_ptr, ranks_ptr, slots_ptr, v_ptr, stride_x, num_tokens, split_size,
    IN: tl.constexpr, P: tl.constexpr, R: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_I: tl.constexpr, ON_GPU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """v[n, t, p, r] = a[slot, p, r] . x[t] over the n-th `split_size` inputs; one program per block
    of tokens, part and split, slot by slot of those that its tokens have."""
    tokens, part = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T), tl.program_id(1)
    split = tl.program_id(2)
    begin, end = split * split_size, tl.minimum((split + 1) * split_size, IN)
    is_token = tokens < num_tokens
    let_next_start(PDL)
    slots = tl.load(slots_ptr + tokens, mask=is_token, other=-1)
    wait_for_previous(PDL)
    rows, inputs = tl.arange(0, R), tl.arange(0, BLOCK_I)
    x_rows = x_ptr + tokens[:, None].to(tl.int64) * stride_x
    left = slots
    slot = tl.max(left, 0)
    while slot >= 0:
        is_own = slots == slot
        rank = tl.load(ranks_ptr + slot * P + part)
        if rank > 0:
            a_rows = a_ptr + ((slot.to(tl.int64) * P + part) * R + rows[None, :]) * IN
            v = tl.zeros((BLOCK_T, R), tl.float32)
            for start in range(begin, end, BLOCK_I):
                at = start + inputs
                x_mask = is_own[:, None] & (at < IN)[None, :]
                x = tl.load(x_rows + at[None, :], mask=x_mask, other=0.0)
                a_mask = (rows < rank)[None, :] & (at < IN)[:, None]
                a = tl.load(a_rows + at[:, None], mask=a_mask, other=0.0)
                v = dot(x, a, v, ON_GPU)
            v_rows = (split.to(tl.int64) * num_tokens + tokens[:, None]) * P + part
            tl.store(v_ptr + v_rows * R + rows[None, :], v, mask=is_own[:, None])
        left = tl.where(is_own, -1, left)
        slot = tl.max(left, 0)


@_jit()
def _expand_tiles(
    v_ptr, b_ptr, ranks_ptr, slots_ptr, y_ptr, stride_y, num_tokens, num_splits, n0, n1, n2, n3,
    OUT: tl.constexpr, P: tl.constexpr, R: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr, GEMM_DTYPE: tl.constexpr, ON_GPU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y[t, o] += (sum over n of v[n, t, p]) . b[slot, :, o]; one program per block of tokens and
    block of outputs, slot by slot of those that its tokens have."""
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    part, begin, size = _part_of(tl.program_id(1), n0, n1, n2, n3, BLOCK_O)
    is_token = tokens < num_tokens
    let_next_start(PDL)
    slots = tl.load(slots_ptr + tokens, mask=is_token, other=-1)
    wait_for_previous(PDL)
    outputs, rows = tl.arange(0, BLOCK_O), tl.arange(0, R)
    is_output = outputs < size
    v_at = v_ptr + (tokens[:, None].to(tl.int64) * P + part) * R + rows[None, :]
    split_stride = num_tokens * P * R
    delta = tl.zeros((BLOCK_T, BLOCK_O), tl.float32)
    left = slots
    slot = tl.max(left, 0)
    while slot >= 0:
        is_own = slots == slot
        rank = tl.load(ranks_ptr + slot * P + part)
        if rank > 0:
            is_rank = rows < rank
            v_mask = is_own[:, None] & is_rank[None, :]
            v = tl.load(v_at, mask=v_mask, other=0.0)
            for split in range(1, num_splits):
                v += tl.load(v_at + split * split_stride, mask=v_mask, other=0.0)
            b_at = b_ptr + (slot.to(tl.int64) * R + rows[:, None]) * OUT + begin + outputs[None, :]
            b = tl.load(b_at, mask=is_rank[:, None] & is_output[None, :], other=0.0)
            delta = dot(v.to(GEMM_DTYPE), b, delta, ON_GPU)
        left = tl.where(is_own, -1, left)
        slot = tl.max(left, 0)
    y_at = y_ptr + tokens[:, None].to(tl.int64) * stride_y + begin + outputs[None, :]
    mask = (slots >= 0)[:, None] & is_output[None, :]
    y = tl.load(y_at, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_at, (y + delta).to(y_ptr.dtype.element_ty), mask=mask)


def _groups_fit(slots, size):
    return size & (size - 1) == 0


@lora_groups.impl("triton", needs=arch(80), fits=_groups_fit)
def lora_groups_triton(slots, size):
    num_tokens = slots.shape[0]
    groups = torch.empty(num_tokens, size, dtype=torch.int32, device=slots.device)
    if num_tokens:
        _groups[num_tokens,](slots, groups, num_tokens, G=size, BLOCK=64, num_warps=1)
    return groups


def _fits(x, y, a, b, ranks, slots, part_sizes, groups):
    size = a.shape[2]
    is_power = size & (size - 1) == 0
    is_even = groups is None or groups.shape[1] % 2 == 0
    return len(part_sizes) <= _MAX_PARTS and is_power and 16 <= size <= 256 and is_even


@lora.impl("triton", needs=arch(80), fits=_fits)
def lora_triton(x, y, a, b, ranks, slots, part_sizes, groups):
    assert x.stride(1) == y.stride(1) == 1 and a.is_contiguous() and b.is_contiguous()
    assert x.dtype == a.dtype == b.dtype, (x.dtype, a.dtype, b.dtype)
    num_single = 0 if groups is None else groups.shape[0]
    if num_single:
        end = num_single
        _singles(x[:end], y[:end], a, b, ranks, slots[:end], part_sizes, groups)
    if num_single < x.shape[0]:
        first = num_single
        _tiles(x[first:], y[first:], a, b, ranks, slots[first:], part_sizes)


def _sizes(part_sizes):
    return (*part_sizes, *(0,) * (_MAX_PARTS - len(part_sizes)))


def _singles(x, y, a, b, ranks, slots, part_sizes, groups):
    num_tokens, (num_parts, size, in_size) = x.shape[0], a.shape[1:]
    v = torch.empty(num_tokens, num_parts, size, dtype=torch.float32, device=x.device)
    options = {"G": groups.shape[1], **launch_options(x)}
    block_in = min(_BLOCK_A, next_power_of_2(in_size))
    rows = min(size, _BLOCK_A // block_in)
    num_items = num_tokens * num_parts * (size // rows)
    _shrink[min(num_items, _SHRINKS * num_sms()),](
        x, a, ranks, slots, groups, v, x.stride(0), num_tokens,
        IN=in_size, P=num_parts, R=size, ROWS=rows, BLOCK_I=block_in, num_warps=8, **options,
    )  # fmt: skip
    num_blocks = sum(cdiv(width, _BLOCK_O) for width in part_sizes)
    _expand[min(num_tokens * num_blocks, _EXPANDS * num_sms()),](
        v, b, ranks, slots, groups, y, y.stride(0), num_tokens, *_sizes(part_sizes),
        OUT=b.shape[2], P=num_parts, R=size, RANKS=_RANKS, BLOCK_O=_BLOCK_O, BLOCKS=num_blocks,
        num_warps=2, **options,
    )  # fmt: skip


def _tiles(x, y, a, b, ranks, slots, part_sizes):
    num_tokens, (num_parts, size, in_size) = x.shape[0], a.shape[1:]
    num_blocks, options = cdiv(num_tokens, _TILE_T), launch_options(x)
    block_in = _TILE_I if size <= 64 else 64
    num_wanted = min(_MAX_SPLITS, cdiv(num_sms(), num_blocks * num_parts))
    split_size = cdiv(cdiv(in_size, block_in), num_wanted) * block_in
    num_splits = cdiv(in_size, split_size)
    v = torch.empty(num_splits, num_tokens, num_parts, size, dtype=torch.float32, device=x.device)
    _shrink_tiles[num_blocks, num_parts, num_splits](
        x, a, ranks, slots, v, x.stride(0), num_tokens, split_size,
        IN=in_size, P=num_parts, R=size, BLOCK_T=_TILE_T, BLOCK_I=block_in,
        ON_GPU=x.is_cuda, **options,
    )  # fmt: skip
    num_outputs = sum(cdiv(width, _TILE_O) for width in part_sizes)
    _expand_tiles[num_blocks, num_outputs](
        v, b, ranks, slots, y, y.stride(0), num_tokens, num_splits, *_sizes(part_sizes),
        OUT=b.shape[2], P=num_parts, R=size, BLOCK_T=_TILE_T, BLOCK_O=_TILE_O,
        GEMM_DTYPE=TRITON_DTYPES[x.dtype], ON_GPU=x.is_cuda, **options,
    )  # fmt: skip
