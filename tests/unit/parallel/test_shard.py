"""Shares cover everything, once, whatever the sizes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.parallel.shard import (
    Piece,
    Span,
    split,
    split_groups,
    split_heads,
    split_padded,
    stack_shards,
    whole,
)


@given(part=st.integers(1, 50), num_ranks=st.integers(1, 16))
def test_split_parts_follow_each_other_and_cover_everything(part, num_ranks):
    spans = [split("x", part * num_ranks, num_ranks, rank) for rank in range(num_ranks)]
    covered = [index for span in spans for index in range(span.start, span.stop)]
    assert covered == list(range(part * num_ranks))


@given(size=st.integers(1, 300), group=st.integers(1, 40), num_ranks=st.integers(1, 16))
def test_groups_stay_together_and_parts_differ_by_one_of_them(size, group, num_ranks):
    if -(-size // group) < num_ranks:
        with pytest.raises(ConfigError, match=f"width is {size}, .* at most {-(-size // group)}"):
            split_groups("width", size, group, num_ranks, 0)
        return
    spans = [split_groups("width", size, group, num_ranks, rank) for rank in range(num_ranks)]
    covered = [index for span in spans for index in range(span.start, span.stop)]
    assert covered == list(range(size))
    assert all(span.start % group == 0 and span.size for span in spans)
    counts = [-(-span.size // group) for span in spans]
    assert max(counts) - min(counts) <= 1


def test_split_that_does_not_divide_names_the_numbers():
    with pytest.raises(ConfigError, match="width is 10, which 4 ranks"):
        split("width", 10, 4, 0)


@given(
    num_kv=st.sampled_from([1, 2, 4, 8]),
    group=st.sampled_from([1, 2, 7, 8]),
    num_ranks=st.sampled_from([1, 2, 4, 8]),
)
def test_each_query_head_finds_its_kv_head_on_its_rank(num_kv, group, num_ranks):
    num_heads = num_kv * group
    if num_heads % num_ranks:
        return
    shares = [split_heads(num_heads, num_kv, num_ranks, rank) for rank in range(num_ranks)]
    assert {head for share in shares for head in range(share.kv.start, share.kv.stop)} == set(
        range(num_kv)
    )
    for share in shares:
        local_group = share.query.size // share.kv.size
        for index in range(share.query.size):
            assert (share.query.start + index) // group == share.kv.start + index // local_group


def test_kv_heads_that_can_neither_split_nor_repeat_are_refused():
    with pytest.raises(ConfigError, match="3 KV heads cannot be repeated over 4 ranks"):
        split_heads(12, 3, 4, 0)
    with pytest.raises(ConfigError, match="number of KV heads is 3"):
        split_heads(12, 3, 2, 0)


@given(
    size=st.integers(1, 5000),
    num_ranks=st.integers(1, 9),
    multiple=st.sampled_from([1, 8, 64]),
)
def test_padded_split_gives_equal_rows_and_takes_each_source_row_once(size, num_ranks, multiple):
    parts = [split_padded(size, num_ranks, rank, multiple) for rank in range(num_ranks)]
    rows = {num_rows for _, num_rows in parts}
    assert len(rows) == 1 and rows.pop() % multiple == 0
    taken = []
    for rank, (share, num_rows) in enumerate(parts):
        assert share.target == Span(0, share.source.size) and share.source.size <= num_rows
        assert share.source.size == 0 or share.source.start == rank * num_rows
        taken += range(share.source.start, share.source.stop)
    assert taken == list(range(size))


def test_stacked_shares_land_one_after_the_other():
    first, second = stack_shards([(8, Span(4, 4)), (6, Span(2, 3))])
    assert (first.source, first.target) == (Span(4, 4), Span(0, 4))
    assert (second.source, second.target, second.full_size) == (Span(2, 3), Span(4, 3), 6)


def test_piece_speaks_in_slices():
    (rows,) = stack_shards([(8, Span(4, 4))])
    piece = Piece((rows, whole(3)))
    assert piece.full_shape == (8, 3)
    assert piece.source == (slice(4, 8), slice(0, 3))
    assert piece.target == (slice(0, 4), slice(0, 3))
    assert not piece.is_empty
