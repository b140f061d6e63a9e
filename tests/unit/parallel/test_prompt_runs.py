"""Zig-zag: every token has one rank, and ranks have as much to do."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.parallel.prompt_runs import zigzag


@given(lens=st.lists(st.integers(1, 70), min_size=1, max_size=6), num_ranks=st.integers(1, 8))
def test_each_token_is_one_ranks_and_numbers_differ_by_one_at_most(lens, num_ranks):
    runs = zigzag(lens, num_ranks)
    tokens = [
        [(run.chunk, token) for run in own for token in range(run.start, run.end)] for own in runs
    ]
    assert all(own == sorted(own) for own in tokens)
    everyone = sorted(token for own in tokens for token in own)
    assert everyone == [(chunk, at) for chunk, length in enumerate(lens) for at in range(length)]
    counts = [len(own) for own in tokens]
    assert max(counts) - min(counts) <= 1


def test_ranks_attend_to_as_many_keys():
    """Of a long prompt at once, where contiguous shares would differ by a factor of 7."""
    keys = [
        sum(position + 1 for run in own for position in range(run.start, run.end))
        for own in zigzag([4096], 4)
    ]
    assert max(keys) == min(keys)
