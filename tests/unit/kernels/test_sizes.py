"""Sizes of grids and blocks: Triton's own, which it computes at the same places."""

import pytest
import triton

from penstock.kernels.sizes import cdiv, next_power_of_2


@pytest.mark.parametrize("n", [0, 1, 2, 3, 4, 5, 127, 128, 129, 100_000])
def test_sizes_are_tritons(n: int) -> None:
    assert next_power_of_2(max(n, 1)) == triton.next_power_of_2(max(n, 1))
    assert cdiv(n, 128) == triton.cdiv(n, 128)
