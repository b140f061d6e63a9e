"""`sorted_pairs`: (token, expert) pairs sorted by expert into blocks of one expert each.

Up to 1024 pairs are counted and placed by one program. More are cut into chunks, one for each
program: a first launch counts, by chunk and slot, and each program of the second accumulates the
counts by itself.

Legend: T tokens, S slots, K experts of a token, P = T * K pairs, C chunks of pairs, B blocks of
pairs, M pairs of a block.
"""

import torch
import triton.language as tl
from torch import Tensor

from penstock.kernels.launch import jit
from penstock.kernels.pdl import launch_options, let_next_start, wait_for_previous
from penstock.kernels.sizes import cdiv, next_power_of_2

_MAX_ALONE = 1024  # pairs of one program; H200: 3.2 us, as two launches 5.2; 2048 pairs 5.4 and 4.9
_CHUNKS = 128  # about as many as there are SMs
_MIN_CHUNK, _MAX_CHUNK = 128, 1024


@jit(do_not_specialize=["num_pairs", "num_blocks"])
def _sort(
    slots_ptr, next_ptr, pairs_ptr, block_slots_ptr, num_pairs, num_blocks, S,
    M: tl.constexpr, BLOCK_S: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """All in one program; next[slot] is first the slot's count, then its place.

    A slot has the blocks behind those of the slots before it. block_slots[block] is S where a block
    is empty, pairs[place] is num_pairs where there is no pair. The order within a slot does not
    matter. Pairs of slot S, which does not exist, are left out.
    """
    let_next_start(PDL)
    wait_for_previous(PDL)
    slots, offsets = tl.arange(0, BLOCK_S), tl.arange(0, CHUNK)
    is_slot, ones = slots < S, tl.full((CHUNK,), 1, tl.int32)
    tl.store(next_ptr + slots, tl.zeros((BLOCK_S,), tl.int32), mask=is_slot)
    for first in range(0, num_blocks * M, CHUNK):
        places = first + offsets
        tl.store(
            pairs_ptr + places, tl.zeros_like(places) + num_pairs, mask=places < num_blocks * M
        )
    for first in range(0, num_blocks, CHUNK):
        blocks = first + offsets
        tl.store(block_slots_ptr + blocks, tl.zeros_like(blocks) + S, mask=blocks < num_blocks)
    tl.debug_barrier()
    chosen = tl.load(slots_ptr + offsets, mask=offsets < num_pairs, other=S)
    is_pair = chosen < S
    tl.atomic_add(next_ptr + chosen, ones, mask=is_pair, sem="relaxed")
    tl.debug_barrier()
    counts = tl.load(next_ptr + slots, mask=is_slot, other=0, cache_modifier=".cg")
    num_each = (counts + M - 1) // M
    starts = tl.cumsum(num_each, 0) - num_each
    tl.debug_barrier()
    tl.store(next_ptr + slots, starts * M, mask=is_slot)
    tl.debug_barrier()
    places = tl.atomic_add(next_ptr + chosen, ones, mask=is_pair, sem="relaxed")
    tl.store(pairs_ptr + places, offsets, mask=is_pair)
    # The first pair of a block says whose it is.
    tl.store(block_slots_ptr + places // M, chosen, mask=is_pair & (places % M == 0))


@jit(do_not_specialize=["num_pairs"])
def _count(
    slots_ptr, counts_ptr, num_pairs, S,
    BLOCK_S: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """counts[chunk, slot] = pairs of the chunk that are the slot's; one program per chunk."""
    wait_for_previous(PDL)
    let_next_start(PDL)  # not before: the next kernel reads slots before it waits
    chunk = tl.program_id(0)
    pairs, slots = chunk * CHUNK + tl.arange(0, CHUNK), tl.arange(0, BLOCK_S)
    chosen = tl.load(slots_ptr + pairs, mask=pairs < num_pairs, other=S)
    counts = tl.histogram(chosen, BLOCK_S, mask=chosen < S)
    tl.store(counts_ptr + chunk * S + slots, counts.to(tl.int16), mask=slots < S)


@jit(do_not_specialize=["num_pairs", "num_blocks", "num_chunks"])
def _place(
    slots_ptr, counts_ptr, pairs_ptr, block_slots_ptr, num_pairs, num_blocks, num_chunks, S,
    M: tl.constexpr, BLOCK_S: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
    BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Writes the pairs of a chunk where they belong, in their order, and what is said of some
    blocks; the same as `_sort`."""
    let_next_start(PDL)
    chunk = tl.program_id(0)
    slots, offsets = tl.arange(0, BLOCK_S), tl.arange(0, CHUNK)
    pairs = chunk * CHUNK + offsets
    chosen = tl.load(slots_ptr + pairs, mask=pairs < num_pairs, other=S)
    keys = tl.sort(chosen * CHUNK + offsets)  # by slot, then as they came
    chosen, pairs = keys // CHUNK, chunk * CHUNK + keys % CHUNK
    is_pair = chosen < S
    own = tl.histogram(chosen, BLOCK_S, mask=is_pair)
    wait_for_previous(PDL)
    all_counts = tl.zeros((ROWS, BLOCK_S), tl.int32)
    early_counts = tl.zeros((ROWS, BLOCK_S), tl.int32)
    for first in range(0, num_chunks, ROWS):
        chunks = (first + tl.arange(0, ROWS))[:, None]
        mask = (chunks < num_chunks) & (slots < S)[None, :]
        counts = tl.load(counts_ptr + chunks * S + slots[None, :], mask=mask, other=0)
        all_counts += counts
        early_counts += tl.where(chunks < chunk, counts, 0)
    totals, before = tl.sum(all_counts, 0), tl.sum(early_counts, 0)
    num_each = (totals + M - 1) // M
    ends = tl.cumsum(num_each, 0)
    starts = (ends - num_each) * M
    shift = starts + before - (tl.cumsum(own, 0) - own)  # from a place in the chunk
    places = tl.gather(shift, tl.minimum(chosen, S - 1), 0) + offsets
    tl.store(pairs_ptr + places, pairs, mask=is_pair)

    within = tl.arange(0, M)[None, :]
    for first in range(chunk * BLOCKS, num_blocks, num_chunks * BLOCKS):
        blocks = first + tl.arange(0, BLOCKS)
        slot = tl.minimum(tl.sum((ends[None, :] <= blocks[:, None]).to(tl.int32), 1), S)
        tl.store(block_slots_ptr + blocks, slot, mask=blocks < num_blocks)
        last = tl.where(slot < S, tl.gather(starts + totals, tl.minimum(slot, S - 1), 0), 0)
        free = (blocks * M)[:, None] + within
        is_free = (free >= last[:, None]) & (blocks < num_blocks)[:, None]
        tl.store(pairs_ptr + free, tl.zeros_like(free) + num_pairs, mask=is_free)


def rows_per_block(num_pairs: int, num_slots: int, format: str) -> int:
    """About as many as an expert has: fewer read weights again, more stay empty. A little more than
    on average, but not where a block dequantizes the weights, however full it is.

    Block scales need a second accumulator, and 128 rows of it more registers than there are.
    """
    most = 64 if format == "fp8 blocks" else 128
    usual = num_pairs // num_slots
    if format == "plain" or format.startswith("fp8"):
        usual += usual // 4
    return min(max(next_power_of_2(usual), 16), most)


def sorted_pairs(slots_TK: Tensor, num_slots: int, block: int) -> tuple[Tensor, Tensor]:
    """(pairs_BM, block_slots_B): the pairs in blocks of one slot each; P where there is no pair.

    B is the most there can be: every slot may have one block that is not full.
    """
    num_pairs, device = slots_TK.numel(), slots_TK.device
    num_blocks = num_pairs // block + min(num_slots, num_pairs)
    pairs_BM = torch.empty((num_blocks, block), dtype=torch.int32, device=device)
    block_slots_B = torch.empty(num_blocks, dtype=torch.int32, device=device)
    if num_pairs <= _MAX_ALONE:
        chunk = max(next_power_of_2(num_pairs), _MIN_CHUNK)
        _sort[(1,)](
            slots_TK, torch.empty(num_slots, dtype=torch.int32, device=device), pairs_BM,
            block_slots_B, num_pairs, num_blocks, num_slots,
            M=block, BLOCK_S=next_power_of_2(num_slots), CHUNK=chunk,
            num_warps=max(4, chunk // 64), **launch_options(slots_TK),
        )  # fmt: skip
        return pairs_BM, block_slots_B
    wanted = next_power_of_2(cdiv(num_pairs, _CHUNKS))
    chunk = min(max(wanted, _MIN_CHUNK), _MAX_CHUNK)
    num_chunks, block_s = cdiv(num_pairs, chunk), max(next_power_of_2(num_slots), 32)
    counts_CS = torch.empty((num_chunks, num_slots), dtype=torch.int16, device=device)
    _count[(num_chunks,)](
        slots_TK, counts_CS, num_pairs, num_slots, BLOCK_S=block_s, CHUNK=chunk, num_warps=4,
        **launch_options(slots_TK),
    )  # fmt: skip
    _place[(num_chunks,)](
        slots_TK, counts_CS, pairs_BM, block_slots_B, num_pairs, num_blocks, num_chunks, num_slots,
        M=block, BLOCK_S=block_s, CHUNK=chunk, ROWS=max(1, 4096 // block_s), BLOCKS=16,
        num_warps=min(chunk // 32, max(8, chunk // 64)), **launch_options(slots_TK),
    )  # fmt: skip
    return pairs_BM, block_slots_B
