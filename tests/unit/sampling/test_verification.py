"""Which drawn tokens count where some were drafted, and what sampling makes of it."""

import copy

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.sampling.sampler import Sampler
from penstock.sampling.verification import DraftedRows, verify
from penstock.types.sampling import SamplingParams
from penstock.types.step import RowJoin

CPU = torch.device("cpu")
VOCAB = 12


def drafted_rows(drafts: list[list[int]]) -> DraftedRows:
    width = max(map(len, drafts))
    padded = [[*one, *[-1] * (width - len(one))] for one in drafts]
    counts = np.array([1 + len(one) for one in drafts], np.int32)
    return DraftedRows(counts, torch.tensor(padded).view(len(drafts), width))


@settings(deadline=None)
@given(st.lists(st.lists(st.tuples(st.integers(-1, 2), st.integers(0, 2))), min_size=1, max_size=6))
def test_the_longest_right_prefix_counts_and_one_token_more(entries):
    drafted = drafted_rows([[draft for draft, _ in entry] for entry in entries])
    drawn = [[token for _, token in entry] + [9] for entry in entries]
    accepted = verify(torch.tensor([token for one in drawn for token in one]), drafted)
    for i, (entry, tokens) in enumerate(zip(entries, drawn, strict=True)):
        num_right = next((j for j, (a, b) in enumerate(entry) if a != b), len(entry))
        count = int(accepted.num_accepted_N[i])
        assert count == num_right + 1
        assert accepted.token_ids_NW[i, :count].tolist() == tokens[:count]


def join(row: int, num_prompt: int = 1, **sampling) -> RowJoin:
    params = SamplingParams(**({"temperature": 0.0} | sampling))
    return RowJoin(
        request_id=row, dp_rank=0, row=row, token_ids=np.arange(num_prompt, dtype=np.int32),
        num_computed=0, num_prompt=num_prompt, sampling=params, stop_ids=(),
    )  # fmt: skip


def one_by_one(sampler: Sampler, logits_WV: torch.Tensor, row: int, first: int) -> list[int]:
    rows = np.array([row], np.int32)
    return [
        int(
            sampler.sample(
                logits_WV[j : j + 1], rows, torch.tensor([row]), torch.tensor([first + j])
            ).token_ids_L
        )
        for j in range(len(logits_WV))
    ]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), num_right=st.integers(0, 3), num_steps=st.integers(1, 3))
def test_every_position_draws_what_plain_decoding_would_and_penalties_advance(
    seed, num_right, num_steps
):
    torch.manual_seed(seed)
    asked = dict(
        temperature=0.8, seed=seed, top_k=8, min_p=0.01, repetition_penalty=1.4,
        presence_penalty=0.5, frequency_penalty=0.7, logit_bias={3: 1.0},
        bad_words_token_ids=[(a, b) for a in range(0, VOCAB, 2) for b in range(1, 4)],
    )  # fmt: skip
    together, apart = (Sampler(4, VOCAB, CPU, seed=0) for _ in range(2))
    for sampler in (together, apart):
        sampler.join([join(0, 3, **asked), join(1, 2)])
    index = 3
    for _ in range(num_steps):
        logits_WV = torch.randn(4, VOCAB)
        plain = one_by_one(copy.deepcopy(apart), logits_WV, 0, index)
        drafts = [t if j < num_right else (t + 1) % VOCAB for j, t in enumerate(plain[:3])]
        # A second sequence, greedy and without drafts, stands before the first.
        drafted = drafted_rows([[], drafts])
        other_V = torch.randn(1, VOCAB)
        sampled = together.sample(
            torch.cat((other_V, logits_WV)), np.array([1, 0, 0, 0, 0], np.int32),
            torch.tensor([1, 0, 0, 0, 0]), torch.tensor([2, *range(index, index + 4)]),
            drafted=drafted,
        )  # fmt: skip
        accepted = verify(sampled.token_ids_L, drafted)
        count = int(accepted.num_accepted_N[1])
        assert count == num_right + 1
        assert accepted.token_ids_NW[1, :count].tolist() == plain[:count]
        assert int(accepted.token_ids_NW[0, 0]) == int(other_V.argmax())
        assert one_by_one(apart, logits_WV[:count], 0, index) == plain[:count]
        index += count
        seen, expected = together._state.seen, apart._state.seen
        assert torch.equal(seen.output_counts_SV[1], expected.output_counts_SV[1])


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    expected = probabilities * counts.sum()
    return float(((counts - expected).square() / expected).sum())


def test_sampled_tokens_keep_their_distribution_behind_accepted_drafts():
    """Of 8000 sequences with the same logits: first tokens, and second ones where there are any."""
    torch.manual_seed(0)
    num_rows, temperature = 8000, 0.9
    logits_2V = torch.randn(2, VOCAB)
    sampler = Sampler(num_rows, VOCAB, CPU, seed=5)
    sampler.join([join(row, temperature=temperature) for row in range(num_rows)])
    draft = int(logits_2V[0].argmax())
    rows = np.repeat(np.arange(num_rows, dtype=np.int32), 2)
    drafted = drafted_rows([[draft]] * num_rows)
    sampled = sampler.sample(
        logits_2V.repeat(num_rows, 1), rows, torch.from_numpy(rows).long(),
        torch.tensor([1, 2]).repeat(num_rows), drafted=drafted,
    )  # fmt: skip
    accepted = verify(sampled.token_ids_L, drafted)
    firsts = accepted.token_ids_NW[:, 0]
    seconds = accepted.token_ids_NW[accepted.num_accepted_N == 2, 1]
    assert len(seconds) == int((firsts == draft).sum()) > 1000
    probabilities = (logits_2V / temperature).softmax(-1)
    for tokens, expected in ((firsts, probabilities[0]), (seconds, probabilities[1])):
        counts = torch.bincount(tokens, minlength=VOCAB)
        assert chi_square(counts, expected) < 31.3  # 11 degrees of freedom: one in a thousand
