"""Into how many parts the inputs of a product are split, so that its programs fill the GPU."""

import functools

_COST = 0.015  # of the whole time: a split's sums are written and read
_MIN_TILES = 4  # of a split
_MAX_SPLITS = 16


@functools.cache
def even_splits(
    num_programs: int, at_a_time: int, num_tiles: int, max_splits: int = _MAX_SPLITS
) -> int:
    """As many as leave the fewest places of the GPU empty: of a product that has `num_programs`
    without splits and `num_tiles` of inputs, on a GPU that runs so many programs at a time."""

    def cost(splits: int) -> float:
        rounds = -(-num_programs * splits // at_a_time)
        return rounds / splits * (1 + _COST * splits)

    return min(range(1, max(1, min(max_splits, num_tiles // _MIN_TILES)) + 1), key=cost)
