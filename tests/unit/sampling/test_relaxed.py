"""Relaxed acceptance: which drafts take the place of the drawn token, against plain Python."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from joins import join

from penstock.config.run import ThinkingDrafts, TypicalDrafts
from penstock.sampling.relaxed import RelaxedDraws
from penstock.sampling.verification import DraftedRows, verify

VOCAB, BEGIN, END = 12, 10, 11
CPU = torch.device("cpu")


def is_near(probs: list[float], draft: int, asked) -> bool:
    if isinstance(asked, TypicalDrafts):
        entropy = -sum(p * math.log(p) for p in probs)
        least = min(asked.threshold, math.sqrt(asked.threshold) * math.exp(-entropy))
        return probs[draft] > least
    rank = sum(p > probs[draft] for p in probs)
    return rank < asked.top_k and probs[draft] >= max(probs) - asked.delta


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    asked=st.one_of(
        st.builds(
            ThinkingDrafts, top_k=st.integers(1, 5), delta=st.floats(0, 1),
            begin=st.just(BEGIN), end=st.just(END),
        ),
        st.builds(TypicalDrafts, threshold=st.floats(0.01, 0.9)),
    ),
)  # fmt: skip
def test_tokens_are_those_of_a_plain_walk(seed, asked):
    rng = np.random.default_rng(seed)
    num_rows, most = 3, 3
    draws = RelaxedDraws(asked, num_rows, CPU)
    prompts = [[1, BEGIN, 2], [BEGIN, END], [3]]
    draws.join([join(row, ids) for row, ids in enumerate(prompts)])
    texts = [list(ids) for ids in prompts]
    for _ in range(6):
        # Those with drafts follow the others.
        counts = np.sort(rng.integers(1, most + 2, num_rows)).astype(np.int32)
        logits_LV = torch.tensor(rng.normal(size=(counts.sum(), VOCAB)) * 2, dtype=torch.float32)
        drafts_NK = torch.tensor(rng.integers(-1, VOCAB, (num_rows, most)))
        drafted = DraftedRows(counts, drafts_NK[:, : max(1, counts.max() - 1)])
        if counts.max() == 1:
            drafted = None
        rows_L = torch.tensor(np.repeat(np.arange(num_rows), counts))
        drawn_L = logits_LV.argmax(-1)
        taken_L = draws.take(drawn_L, logits_LV, rows_L, drafted)
        if drafted is None:
            found = [[int(token)] for token in taken_L]
        else:
            accepted = verify(taken_L, drafted)
            found = [
                ids[:n].tolist()
                for ids, n in zip(accepted.token_ids_NW, accepted.num_accepted_N, strict=True)
            ]
        first = 0
        for row, count in enumerate(counts):
            expected = []
            for j in range(count):
                text = texts[row] + expected
                last = next((t for t in reversed(text) if t in (BEGIN, END)), END)
                probs = logits_LV[first + j].double().softmax(-1).tolist()
                draft = int(drafts_NK[row, j]) if j < count - 1 else -1
                may = isinstance(asked, TypicalDrafts) or last == BEGIN
                if draft >= 0 and may and is_near(probs, draft, asked):
                    expected.append(draft)
                else:
                    expected.append(int(drawn_L[first + j]))
                if expected[-1] != draft:
                    break
            assert found[row] == expected
            texts[row] += expected
            first += count


def test_a_strict_rule_takes_nothing_but_the_likeliest():
    draws = RelaxedDraws(ThinkingDrafts(top_k=1, delta=0.0, begin=BEGIN, end=END), 1, CPU)
    draws.join([join(0, [BEGIN])])
    logits_LV = torch.randn(2, VOCAB)
    drawn_L = logits_LV.argmax(-1)
    drafted = DraftedRows(np.array([2], np.int32), torch.tensor([[(int(drawn_L[0]) + 1) % VOCAB]]))
    assert draws.take(drawn_L, logits_LV, torch.zeros(2, dtype=torch.int64), drafted).equal(drawn_L)


@pytest.mark.parametrize("token", [BEGIN, END])
def test_a_row_that_joins_begins_anew(token):
    asked = ThinkingDrafts(top_k=VOCAB, delta=1.0, begin=BEGIN, end=END)
    draws = RelaxedDraws(asked, 1, CPU)
    draws.join([join(0, [BEGIN])])
    draws.join([join(0, [token])])
    logits_LV = torch.arange(VOCAB * 2.0).view(2, VOCAB)
    drafted = DraftedRows(np.array([2], np.int32), torch.tensor([[4]]))
    taken_L = draws.take(
        logits_LV.argmax(-1), logits_LV, torch.zeros(2, dtype=torch.int64), drafted
    )
    assert taken_L.tolist() == [4 if token == BEGIN else 11, 11]


def test_a_draft_that_a_mask_forbids_is_not_taken_however_few_are_likelier():
    asked = ThinkingDrafts(top_k=5, delta=0.9, begin=BEGIN, end=END)
    draws = RelaxedDraws(asked, 1, CPU)
    draws.join([join(0, [BEGIN])])
    logits_LV = torch.full((2, VOCAB), -torch.inf)
    logits_LV[:, :2] = 1.0
    for draft, taken in ((1, 1), (7, 0)):
        drafted = DraftedRows(np.array([2], np.int32), torch.tensor([[draft]]))
        rows_L = torch.zeros(2, dtype=torch.int64)
        drawn_L = draws.take(logits_LV.argmax(1), logits_LV, rows_L, drafted)
        assert drawn_L[0] == taken
