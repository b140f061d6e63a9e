"""Pairs of tokens and experts brought into blocks of one expert each, in one launch.

Legend: T tokens, S slots, K experts of a token, P = T * K pairs, B blocks of pairs, M pairs of a
block.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.pdl import launch_options, let_next_start, wait_for_previous

_MAX_CHUNK = 4096  # pairs, or places, that the program handles at once


@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])
def _sort(
    slots_ptr, next_ptr, pairs_ptr, block_slots_ptr, num_pairs, num_blocks, S,
    M: tl.constexpr, BLOCK_S: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program counts, plans and places; next[slot] is first the slot's count, then its place.

    A slot has the blocks behind those of the slots before it. block_slots[block] is S where a block
    is empty, pairs[place] is num_pairs where there is no pair. The order within a slot does not
    matter.
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
    for first in range(0, num_pairs, CHUNK):
        pairs = first + offsets
        chosen = tl.load(slots_ptr + pairs, mask=pairs < num_pairs, other=0)
        tl.atomic_add(next_ptr + chosen, ones, mask=pairs < num_pairs, sem="relaxed")
    tl.debug_barrier()
    counts = tl.load(next_ptr + slots, mask=is_slot, other=0, cache_modifier=".cg")
    num_each = (counts + M - 1) // M
    starts = tl.cumsum(num_each, 0) - num_each
    tl.debug_barrier()
    tl.store(next_ptr + slots, starts * M, mask=is_slot)
    tl.debug_barrier()
    for first in range(0, num_pairs, CHUNK):
        pairs = first + offsets
        is_pair = pairs < num_pairs
        chosen = tl.load(slots_ptr + pairs, mask=is_pair, other=0)
        places = tl.atomic_add(next_ptr + chosen, ones, mask=is_pair, sem="relaxed")
        tl.store(pairs_ptr + places, pairs, mask=is_pair)
        # The first pair of a block says whose it is.
        tl.store(block_slots_ptr + places // M, chosen, mask=is_pair & (places % M == 0))


def rows_per_block(num_pairs: int, num_slots: int, format: str) -> int:
    """About as many as an expert has on average: fewer read weights again, more stay empty.

    Blocks of scales need a second sum for every output, and 128 rows more registers than there are.
    """
    most = 64 if format == "fp8 blocks" else 128
    return min(max(triton.next_power_of_2(num_pairs // num_slots), 16), most)


def sorted_pairs(slots_TK: Tensor, num_slots: int, block: int) -> tuple[Tensor, Tensor]:
    """(pairs_BM, block_slots_B): the pairs in blocks of one slot each; P where there is no pair.

    B is the most there can be: every slot may have one block that is not full.
    """
    num_pairs, device = slots_TK.numel(), slots_TK.device
    num_blocks = num_pairs // block + min(num_slots, num_pairs)
    next_S = torch.empty(num_slots, dtype=torch.int32, device=device)
    pairs_BM = torch.empty((num_blocks, block), dtype=torch.int32, device=device)
    block_slots_B = torch.empty(num_blocks, dtype=torch.int32, device=device)
    chunk = min(max(triton.next_power_of_2(num_pairs), 128), _MAX_CHUNK)
    _sort[(1,)](
        slots_TK, next_S, pairs_BM, block_slots_B, num_pairs, num_blocks, num_slots,
        M=block, BLOCK_S=triton.next_power_of_2(num_slots), CHUNK=chunk,
        num_warps=max(4, min(32, chunk // 64)), **launch_options(slots_TK),
    )  # fmt: skip
    return pairs_BM, block_slots_B
