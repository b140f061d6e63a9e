"""The prefix index: a block is found by all of the text before its end, and by nothing less."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.kv.prefix_index import ROOT, PrefixIndex, next_digest


def tokens(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


def insert(index: PrefixIndex, block: int, parent: bytes, *ids: int, keys=()) -> bytes:
    digest = next_digest(parent, tokens(*ids), keys)
    index.insert(block, parent, digest, tokens(*ids), keys)
    return digest


def test_a_block_is_found_by_its_text_and_the_text_before_it():
    index = PrefixIndex()
    first = insert(index, 3, ROOT, 1, 2)
    second = insert(index, 5, first, 1, 2)
    assert first != second and len(index) == 2 and 3 in index and 4 not in index
    assert index.find(first, tokens(1, 2)) == 3
    assert index.find(second, tokens(1, 2)) == 5
    assert index.find(next_digest(second, tokens(1, 2)), tokens(1, 2)) is None


def test_a_digest_alone_decides_nothing():
    """Two texts with one digest, as an attacker would like to have them, are told apart."""
    index = PrefixIndex()
    digest = insert(index, 3, ROOT, 1, 2)
    assert index.find(digest, tokens(1, 3)) is None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((), ("",)),
        (("a",), ("b",)),
        (("a", "b"), ("b", "a")),
        (("ab",), ("a", "b")),
        (("ab", "c"), ("a", "bc")),
    ],
)
def test_blocks_with_other_extra_keys_are_other_blocks(one, other):
    index = PrefixIndex()
    digests = [
        insert(index, block, ROOT, 1, 2, keys=keys) for block, keys in ((3, one), (4, other))
    ]
    assert digests[0] != digests[1]
    for block, keys, digest in zip((3, 4), (one, other), digests, strict=True):
        assert index.find(digest, tokens(1, 2), keys) == block
        assert index.find_partial(ROOT, tokens(1), keys) == (block, 1)
    assert index.find(digests[0], tokens(1, 2), other) is None  # whatever the digest


def test_a_second_block_with_the_same_text_is_left_out():
    index = PrefixIndex()
    digest = insert(index, 3, ROOT, 1, 2)
    insert(index, 4, ROOT, 1, 2)
    assert index.find(digest, tokens(1, 2)) == 3 and 4 not in index


def test_an_evicted_block_is_not_found_any_more():
    index = PrefixIndex()
    digest = insert(index, 3, ROOT, 1, 2)
    index.remove(3)
    assert index.find(digest, tokens(1, 2)) is None
    assert index.find_partial(ROOT, tokens(1)) == (0, 0)
    assert 3 not in index and len(index) == 0 and not index._children
    insert(index, 4, ROOT, 1, 2)  # the same text may come back, in another block
    assert index.find(digest, tokens(1, 2)) == 4


def test_what_is_indexed_does_not_change_with_the_callers_array():
    index, own = PrefixIndex(), tokens(1, 2)
    digest = next_digest(ROOT, own)
    index.insert(3, ROOT, digest, own)
    own[:] = 9
    assert index.find(digest, tokens(1, 2)) == 3


def test_a_partial_match_is_the_longest_common_beginning_after_the_same_text():
    index = PrefixIndex()
    parent = insert(index, 2, ROOT, 8, 8, 8, 8)
    insert(index, 3, ROOT, 1, 2, 3, 4)
    insert(index, 4, ROOT, 1, 2, 9, 9)
    insert(index, 5, parent, 1, 2, 3, 5)
    assert index.find_partial(ROOT, tokens(1, 2, 3)) == (3, 3)
    assert index.find_partial(ROOT, tokens(1, 2, 9, 7)) == (4, 3)
    assert index.find_partial(ROOT, tokens(7, 2, 3)) == (0, 0)
    assert index.find_partial(parent, tokens(1, 2, 3, 4)) == (5, 3)


def test_the_work_of_a_partial_match_is_bounded_newest_first():
    """A client that fills the index with blocks of one beginning slows no admission down."""
    index = PrefixIndex()
    for block in range(1, 1001):
        insert(index, block, ROOT, 7, block, 0, 0)
    assert index.find_partial(ROOT, tokens(7, 999)) == (999, 2)
    assert index.find_partial(ROOT, tokens(7, 1))[1] == 1  # block 1 is too old to be compared


SMALL = st.lists(st.tuples(*[st.integers(0, 2)] * 3), max_size=20)


@given(texts=SMALL, removed=st.lists(st.integers(1, 20)), asked=st.tuples(*[st.integers(0, 2)] * 3))
def test_a_partial_match_is_what_comparing_with_all_blocks_gives(texts, removed, asked):
    index, known = PrefixIndex(), dict[int, tuple[int, ...]]()
    for block, ids in enumerate(texts, 1):
        if ids not in known.values():
            known[block] = ids
        insert(index, block, ROOT, *ids)
    for block in set(removed) & set(known):
        index.remove(block)
        del known[block]

    def num_equal(ids: tuple[int, ...]) -> int:
        return next((i for i in range(3) if ids[i] != asked[i]), 3)

    block, length = index.find_partial(ROOT, tokens(*asked))
    assert length == max(map(num_equal, known.values()), default=0)
    assert block == 0 if not length else num_equal(known[block]) == length
