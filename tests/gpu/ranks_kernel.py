"""The all-reduce of several ranks as one launch: for `collectives_check`, on one GPU."""

# R ranks, T tokens, D hidden size

import triton
import triton.language as tl

from penstock.kernels.all_reduce.triton import _one_shot


@triton.jit
def all_ranks(
    x_ptr, parts_ptr, flags_ptr, residual_ptr, weight_ptr, out_ptr, sum_ptr, numbers, stride,
    max_polls, eps,
    R: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """Program (t, r) is row t of rank r; `numbers` is how many a rank has."""
    rank = tl.program_id(1)
    own = rank.to(tl.int64) * numbers
    _one_shot(
        x_ptr + own, parts_ptr, flags_ptr, residual_ptr, weight_ptr, out_ptr + own, sum_ptr + own,
        rank, max_polls, stride, stride, eps, R, D, BLOCK_D, HAS_NORM, True,
    )  # fmt: skip
