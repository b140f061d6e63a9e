"""Which batch sizes get a CUDA graph."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.graphs import CudaGraphConfig, exact_sizes, padded_sizes

UP_TO_128 = [1, 2, 4, *range(8, 129, 8)]
UP_TO_512 = [*UP_TO_128, *range(144, 257, 16), *range(288, 513, 32)]


@pytest.mark.parametrize(
    ("largest", "expected"),
    [
        (1, [1]),
        (3, [1, 2, 3]),
        (20, [1, 2, 4, 8, 16, 20]),
        (128, UP_TO_128),
        (200, [*UP_TO_128, 144, 160, 176, 192, 200]),
        (720, [*UP_TO_512, 576, 640, 704, 720]),
        (1024, [*UP_TO_512, *range(576, 1025, 64)]),
    ],
)
def test_padded_sizes_step_by_8_to_128_and_then_further(largest, expected):
    assert padded_sizes(largest) == expected


@pytest.mark.parametrize(
    ("largest", "expected"),
    [
        (5, [1, 2, 3, 4, 5]),
        (64, [*range(1, 33), 64]),
        (100, [*range(1, 33), 64, 100]),
        (720, [*range(1, 33), 64, 128, 256, 512, 720]),
    ],
)
def test_exact_sizes_are_dense_and_then_double(largest, expected):
    assert exact_sizes(largest) == expected


def test_an_explicit_list_is_sorted_and_freed_of_repeats():
    assert CudaGraphConfig(batch_sizes=[8, 1, 4, 4]).sizes(64) == (1, 4, 8)


def test_an_explicit_list_may_repeat_its_maximum():
    assert CudaGraphConfig(batch_sizes=[1, 8], max_batch_size=8).sizes(64) == (1, 8)


def test_sizes_beyond_the_batch_limit_become_the_limit():
    assert CudaGraphConfig(max_batch_size=720).sizes(20) == (1, 2, 4, 8, 16, 20)
    assert CudaGraphConfig(batch_sizes=[2, 100, 200]).sizes(50) == (2, 50)


def test_without_a_maximum_the_batch_limit_counts_up_to_512():
    assert CudaGraphConfig().sizes(96)[-1] == 96
    assert CudaGraphConfig().sizes(2048)[-1] == 512


@given(largest=st.integers(1, 65536), limit=st.integers(1, 4096), padding=st.booleans())
def test_sizes_ascend_and_end_at_the_largest_possible_batch(largest, limit, padding):
    sizes = CudaGraphConfig(max_batch_size=largest, enable_padding=padding).sizes(limit)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[0] == 1 and sizes[-1] == min(largest, limit)
