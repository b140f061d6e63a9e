"""Tokens out of logits: greedy, drawn, reproducible, counted."""

import numpy as np
import pytest
import torch
from joins import join
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from penstock.sampling.sampler import Sampler
from penstock.types.step import RowJoin

CPU = torch.device("cpu")
MAX_ROWS = 8
# Upper 1e-4 quantiles of chi-square, for the number of tokens left minus one.
CHI_SQUARE = {1: 15.14, 2: 18.42, 3: 21.11, 4: 23.51, 5: 25.74, 9: 33.72, 19: 50.80}


def make_sampler(*joins: RowJoin, vocab_size: int = 20) -> Sampler:
    sampler = Sampler(MAX_ROWS, vocab_size, CPU, seed=0)
    sampler.join(joins)
    return sampler


def sample(sampler: Sampler, logits: torch.Tensor, rows: list[int], lengths: list[int]):
    return sampler.sample(
        logits,
        np.array(rows, np.int32),
        torch.tensor(rows, dtype=torch.int64),
        torch.tensor(lengths, dtype=torch.int32),
    )


def some_logits(num_rows: int, vocab_size: int = 20, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed))


def draws(num: int, logits: torch.Tensor, **sampling) -> np.ndarray:
    """One row's tokens at indices 0 .. num - 1, as many rows of logits as fit one call."""
    sampler = make_sampler(join(0, seed=42, **sampling), vocab_size=logits.shape[-1])
    indices = torch.arange(num, dtype=torch.int32)
    rows = np.zeros(num, np.int32)
    ids = sampler.sample(logits.expand(num, -1), rows, torch.from_numpy(rows).long(), indices)
    return ids.token_ids_L.numpy()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_is_the_argmax(dtype):
    logits = some_logits(3).to(dtype)
    sampler = make_sampler(*(join(row, temperature=0.0) for row in range(3)))
    sampled = sample(sampler, logits, [2, 0, 1], [4, 5, 6])
    assert sampled.token_ids_L.dtype == torch.int64
    assert torch.equal(sampled.token_ids_L, logits.argmax(-1))
    assert sampled.logprobs is None


def test_greedy_and_drawn_rows_share_a_batch():
    logits = some_logits(3)
    sampler = make_sampler(join(0, temperature=0.0), join(1, seed=1), join(2, temperature=0.0))
    ids = sample(sampler, logits, [0, 1, 2], [4, 5, 6]).token_ids_L
    assert torch.equal(ids[[0, 2]], logits.argmax(-1)[[0, 2]])


def test_the_padding_row_is_greedy():
    logits = some_logits(2)
    sampler = make_sampler(join(0, seed=1, top_k=5, presence_penalty=1.0, logprobs=1))
    ids = sample(sampler, logits, [0, MAX_ROWS], [4, 0]).token_ids_L
    assert ids[1] == logits[1].argmax()


def test_a_step_without_logits_gives_no_tokens():
    sampler = make_sampler(join(0, seed=1, top_k=5, presence_penalty=1.0))
    assert sample(sampler, some_logits(0), [], []).token_ids_L.shape == (0,)


@pytest.mark.parametrize(
    ("sampling", "warpers"),
    [
        ({}, []),
        ({"temperature": 0.5}, [TemperatureLogitsWarper(0.5)]),
        ({"temperature": 3.0}, [TemperatureLogitsWarper(3.0)]),
        ({"top_k": 5}, [TopKLogitsWarper(5)]),
        ({"top_p": 0.7}, [TopPLogitsWarper(0.7)]),
        ({"min_p": 0.3}, [MinPLogitsWarper(0.3)]),
        (
            {"temperature": 1.5, "top_k": 12, "top_p": 0.6, "min_p": 0.1},
            [
                TemperatureLogitsWarper(1.5),
                TopKLogitsWarper(12),
                TopPLogitsWarper(0.6),
                MinPLogitsWarper(0.1),
            ],
        ),
    ],
    ids=lambda value: "" if isinstance(value, list) else str(value),
)
def test_draws_follow_the_distribution(sampling, warpers):
    num = 20_000
    logits = 1.5 * some_logits(1, seed=3)
    probs = LogitsProcessorList(warpers)(None, logits.clone()).softmax(-1)[0].numpy()
    counts = np.bincount(draws(num, logits, **sampling), minlength=20)
    assert (counts[probs == 0] == 0).all()
    expected = num * probs[probs > 0]
    degrees = len(expected) - 1
    limit = min(value for d, value in CHI_SQUARE.items() if d >= degrees)
    assert ((counts[probs > 0] - expected) ** 2 / expected).sum() < limit


@pytest.mark.parametrize("cell_of", [lambda ids: ids % 20, lambda ids: ids * 20 // 9000])
def test_draws_of_a_large_vocabulary_follow_the_distribution(cell_of):
    """One that is drawn in two steps: a block of tokens, then one of it."""
    num, logits = 3000, 2 * some_logits(1, vocab_size=9000, seed=4)
    probs = logits.softmax(-1)[0].numpy()
    expected = num * np.bincount(cell_of(np.arange(9000)), weights=probs)
    counts = np.bincount(cell_of(draws(num, logits)), minlength=20)
    assert ((counts - expected) ** 2 / expected).sum() < CHI_SQUARE[19]


def test_draws_are_independent_of_the_draw_before():
    ids = draws(40_000, torch.zeros(1, 4))
    pairs = np.bincount(ids[:-1] * 4 + ids[1:], minlength=16)
    expected = len(ids) / 16
    assert ((pairs - expected) ** 2 / expected).sum() < 46.0  # 15 degrees, 5e-5


def test_neighboring_seeds_draw_independently():
    ids = {}
    for seed in (7, 8):
        sampler = make_sampler(join(0, seed=seed), vocab_size=4)
        rows = np.zeros(20_000, np.int32)
        logits = torch.zeros(len(rows), 4)
        indices = torch.arange(len(rows))
        ids[seed] = sampler.sample(logits, rows, torch.from_numpy(rows).long(), indices)
    pairs = np.bincount((ids[7].token_ids_L * 4 + ids[8].token_ids_L).numpy(), minlength=16)
    expected = 20_000 / 16
    assert ((pairs - expected) ** 2 / expected).sum() < 46.0


def test_a_seed_draws_the_same_whatever_the_batch_and_the_row():
    logits = some_logits(6, vocab_size=500)
    params = {"seed": 1234, "temperature": 1.2, "top_p": 0.9}
    alone = make_sampler(join(0, **params), vocab_size=500)
    expected = [
        int(sample(alone, logits[:1], [0], [length]).token_ids_L) for length in range(2, 30)
    ]
    assert len(set(expected)) > 5
    crowd = make_sampler(
        join(5, **params),
        join(1, seed=5, top_k=3),
        join(2, temperature=0.0, logprobs=3),
        join(3, presence_penalty=1.0),
        join(4, min_p=0.1, logit_bias={3: 5.0}),
        vocab_size=500,
    )
    together = [
        int(
            sample(
                crowd, logits[[1, 2, 3, 0, 4]], [1, 2, 3, 5, 4], [9, 9, 9, length, 9]
            ).token_ids_L[3]
        )
        for length in range(2, 30)
    ]
    assert together == expected


def test_a_preempted_row_continues_as_if_it_had_not_been():
    """Six tokens in one go, and three of them after a new join that brings the first three back."""
    logits = some_logits(6, vocab_size=50, seed=9)
    params = {"frequency_penalty": 1.5, "repetition_penalty": 1.2, "top_p": 0.95}

    def run(sampler: Sampler, row: int, prompt: list[int], first: int, last: int) -> list[int]:
        tokens = list(prompt)
        for step in range(first, last):
            sampled = sample(sampler, logits[step : step + 1], [row], [len(tokens)])
            tokens.append(int(sampled.token_ids_L))
        return tokens

    whole = run(make_sampler(join(0, [4, 5], **params), vocab_size=50), 0, [4, 5], 0, 6)
    half = run(make_sampler(join(0, [4, 5], **params), vocab_size=50), 0, [4, 5], 0, 3)
    assert half == whole[:5]
    again = make_sampler(join(3, half, num_prompt=2, **params), vocab_size=50)
    assert run(again, 3, half, 3, 6) == whole


def test_penalties_follow_the_tokens_that_were_sampled():
    """Greedy with a repetition penalty over many steps, against the reference processor."""
    penalty = RepetitionPenaltyLogitsProcessor(1.7)
    prompts = [[1, 2, 3], [4, 5]]
    sampler = make_sampler(
        *(
            join(row, prompt, temperature=0.0, repetition_penalty=1.7)
            for row, prompt in enumerate(prompts)
        )
    )
    for step in range(15):
        logits = some_logits(2, seed=step // 3).abs()
        ids = sample(sampler, logits, [1, 0], [len(prompts[1]), len(prompts[0])]).token_ids_L
        for at, row in enumerate((1, 0)):
            tokens = torch.tensor(prompts[row])[None]
            expected = int(penalty(tokens, logits[at : at + 1].clone()).argmax())
            assert int(ids[at]) == expected, (step, row)
            prompts[row].append(expected)


def test_logprobs_come_from_the_raw_logits():
    logits = some_logits(4)
    sampler = make_sampler(
        join(0, seed=1, temperature=2.0, logprobs=3, logit_bias={7: 90.0}),
        join(1, seed=2),
        join(2, temperature=0.0, logprobs=0),
        join(3, seed=4, logprobs=5, top_k=2),
    )
    sampled = sample(sampler, logits, [0, 1, 2, 3], [4, 4, 4, 4])
    assert sampled.logprobs is not None
    rows = sampled.logprobs.start_copy().rows(np.arange(4), np.ones(4, np.int64))
    assert sorted(rows) == [0, 2, 3]
    expected = logits.log_softmax(-1)
    for at, num_top in ((0, 3), (2, 0), (3, 5)):
        row, token = rows[at], int(sampled.token_ids_L[at])
        assert row.token_ids.tolist() == [token]
        np.testing.assert_allclose(row.logprobs, [expected[at, token]], rtol=1e-5)
        order = expected[at].argsort(descending=True)
        assert row.ranks.tolist() == [order.tolist().index(token) + 1]
        assert row.top_ids.tolist() == [order[:num_top].tolist()]
        np.testing.assert_allclose(
            row.top_logprobs, expected[at : at + 1, order[:num_top]], rtol=1e-5
        )
    assert rows[0].token_ids.tolist() == [7]


def test_rows_that_name_tokens_get_those_and_others_the_best():
    logits = some_logits(3)
    sampler = make_sampler(
        join(0, temperature=0.0, logprob_token_ids=[9, 2, 9, 5]),
        join(1, temperature=0.0, logprobs=1),
        join(2, temperature=0.0, logprob_token_ids=[4]),
    )

    def tops():
        found = sample(sampler, logits, [0, 1, 2], [4, 4, 4]).logprobs.start_copy()
        rows = found.rows(np.arange(3), np.ones(3, np.int64))
        expected = logits.log_softmax(-1)
        for at, row in rows.items():
            np.testing.assert_allclose(
                row.top_logprobs, expected[[at]][:, row.top_ids[0]], rtol=1e-5
            )
        return [rows[at].top_ids[0].tolist() for at in range(3)]

    best = logits[:, :].argmax(-1).tolist()
    assert tops() == [[9, 2, 5], [best[1]], [4]]
    sampler.join([join(0, temperature=0.0, logprobs=2)])  # another sequence takes the row
    assert tops()[0] == logits[0].topk(2).indices.tolist()
