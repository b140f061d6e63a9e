"""`choose_split_k`: how many splits of K let the programs of a GEMM fill the GPU."""

import functools

_COST = 0.015  # of the whole time: the partial sums of a split are written and read
_MIN_TILES = 4  # of a split
_MAX_SPLITS = 16


@functools.cache
def choose_split_k(
    num_programs: int, at_a_time: int, num_tiles: int, max_splits: int = _MAX_SPLITS
) -> int:
    """The split-K factor with the least wave quantization, for a GEMM of `num_programs` without
    splits and `num_tiles` along K, on a GPU that runs `at_a_time` programs."""

    def cost(splits: int) -> float:
        rounds = -(-num_programs * splits // at_a_time)
        return rounds / splits * (1 + _COST * splits)

    return min(range(1, max(1, min(max_splits, num_tiles // _MIN_TILES)) + 1), key=cost)
