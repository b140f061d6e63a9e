"""Which batch sizes get a CUDA graph."""

from collections.abc import Iterable

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


def smallest(mixes: Iterable[tuple[int, int]], decodes: int, tokens: int) -> int:
    """Tokens of the smallest captured mix that holds this one."""
    return min(sum(mix) for mix in mixes if decodes <= mix[0] and tokens <= mix[1])


@given(decodes=st.integers(1, 512), tokens=st.integers(1, 512))
def test_every_mix_of_512_decodes_and_512_prompt_tokens_has_a_graph(decodes, tokens):
    at_start, when_idle = CudaGraphConfig(enable_mixed=True).mixes(2048, 8192)
    assert smallest(at_start, decodes, tokens) <= 2 * (decodes + tokens) + 76
    assert smallest(at_start + when_idle, decodes, tokens) <= 1.5 * (decodes + tokens) + 40


@given(max_rows=st.integers(1, 3000), max_num_tokens=st.integers(1, 9000), data=st.data())
def test_within_any_limits_every_mix_has_a_graph(max_rows, max_num_tokens, data):
    at_start, when_idle = CudaGraphConfig(enable_mixed=True).mixes(max_rows, max_num_tokens)
    decodes = data.draw(st.integers(1, min(max_rows, 512)))
    tokens = data.draw(st.integers(1, min(max_num_tokens, 512)))
    assert smallest(at_start, decodes, tokens)
    assert all(mix[0] <= max_rows and mix[1] <= max_num_tokens for mix in at_start + when_idle)
    for mixes in (at_start, when_idle):
        assert [sum(mix) for mix in mixes] == sorted(map(sum, mixes), reverse=True)
    assert not set(at_start) & set(when_idle)


def test_mixes_are_few_at_start_and_none_without_padding():
    at_start, when_idle = CudaGraphConfig().mixes(2048, 8192)
    assert len(at_start) == 28 and len(when_idle) == 63
    for without in ({"enable_mixed": False}, {"enable_padding": False}):
        assert CudaGraphConfig(**without).mixes(2048, 8192) == ((), ())


def test_mixes_without_padding_are_refused():
    with pytest.raises(ValueError, match="enable_padding is false; leave one of the two out"):
        CudaGraphConfig(enable_mixed=True, enable_padding=False)
