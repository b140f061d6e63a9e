"""Drafts from what a sequence held before, against a plain search."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels.ngram import ngram_drafts
from penstock.kernels.ngram.reference import ngram_drafts_numpy


def search(tokens: list[int], max_size: int, num_drafts: int, use_oldest: bool) -> list[int]:
    for size in range(min(max_size, len(tokens) - 1), 0, -1):
        starts = range(len(tokens) - size)
        found = [s for s in starts if tokens[s : s + size] == tokens[-size:]]
        if found:
            end = (found[0] if use_oldest else found[-1]) + size
            return tokens[end : end + num_drafts]
    return []


@settings(max_examples=100, deadline=None)
@given(
    sequences=st.lists(
        st.lists(st.integers(0, 2), min_size=1, max_size=30), min_size=1, max_size=4
    ),
    max_size=st.integers(1, 5),
    num_drafts=st.integers(1, 5),
    use_oldest=st.booleans(),
    spare=st.integers(0, 7),
)
def test_both_versions_find_the_longest_match(sequences, max_size, num_drafts, use_oldest, spare):
    max_len = max(map(len, sequences)) + spare
    history_RT = torch.randint(0, 3, (len(sequences) + 2, max_len + 3), dtype=torch.int32)
    rows = torch.randperm(len(sequences) + 1)[: len(sequences)]
    for row, tokens in zip(rows.tolist(), sequences, strict=True):
        history_RT[row, : len(tokens)] = torch.tensor(tokens)
    lengths = torch.tensor(list(map(len, sequences)))
    asked = (history_RT, rows, lengths, max_len, max_size, num_drafts, use_oldest)
    expected = np.full((len(sequences), num_drafts), -1)
    for i, tokens in enumerate(sequences):
        found = search(tokens, max_size, num_drafts, use_oldest)
        expected[i, : len(found)] = found
    for version in (ngram_drafts.reference, ngram_drafts_numpy):
        np.testing.assert_array_equal(version(*asked).numpy(), expected)


def test_many_long_rows_are_scanned_in_parts():
    torch.manual_seed(0)
    history_RT = torch.randint(0, 900, (41, 120_000), dtype=torch.int32)
    rows, lengths = torch.arange(40), torch.randint(2, 120_000, (40,))
    asked = (history_RT, rows, lengths, 120_000, 2, 4, True)
    assert torch.equal(ngram_drafts.reference(*asked), ngram_drafts_numpy(*asked))
