"""How the tokens of entries of unequal length are shared among programs."""

import triton
import triton.language as tl

from penstock.kernels.sizes import next_power_of_2

_SMALL_BATCH, _LARGE_BATCH = 64, 1024


@triton.jit
def tile_of(index, starts_ptr, first_entry, num_entries, TILE: tl.constexpr, BLOCK_N: tl.constexpr):
    """(entry, number of the tile in it) of the index-th tile of the entries from `first_entry` on.

    A tile is TILE tokens of one entry. Behind the last one the entry is first_entry + num_entries.
    """
    entries = tl.arange(0, BLOCK_N)
    inside = entries < num_entries
    at = starts_ptr + first_entry + entries
    start = tl.load(at, mask=inside, other=0)
    num_tiles = tl.cdiv(tl.load(at + 1, mask=inside, other=0) - start, TILE)
    is_before = inside & (tl.cumsum(num_tiles) <= index)
    tile = index - tl.sum(tl.where(is_before, num_tiles, 0))
    return first_entry + tl.sum(is_before.to(tl.int32)), tile


def block_of_entries(num_entries: int) -> int:
    """`tile_of`'s BLOCK_N, of few sizes: each is a kernel to compile."""
    if num_entries <= _SMALL_BATCH:
        return _SMALL_BATCH
    return max(_LARGE_BATCH, next_power_of_2(num_entries))


def max_tiles(num_tokens: int, num_entries: int, tile: int) -> int:
    """As many tiles as entries of `num_tokens` tokens in all can have; known without the device."""
    return min(num_tokens, num_tokens // tile + num_entries)
