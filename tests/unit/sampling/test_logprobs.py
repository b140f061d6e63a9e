"""Prompt log-probabilities: chunked, bounded, equal to a log-softmax over everything."""

import numpy as np
import pytest
import torch

from penstock.sampling.logprobs import prompt_logprobs, token_logprobs


@pytest.mark.parametrize("num_tokens", [1, 7, 8, 21])
def test_chunks_do_not_change_the_result(num_tokens):
    generator = torch.Generator().manual_seed(0)
    head = torch.randn(16, 50, generator=generator)
    hidden = torch.randn(num_tokens, 16, generator=generator)
    targets = torch.randint(0, 50, (num_tokens,), generator=generator)
    largest = 0

    def logits_fn(hidden_CD: torch.Tensor) -> torch.Tensor:
        nonlocal largest
        largest = max(largest, len(hidden_CD))
        return hidden_CD @ head

    rows = prompt_logprobs(hidden, targets, logits_fn, top_k=4, chunk=8).start_copy().rows()
    assert largest <= 8
    expected = (hidden @ head).log_softmax(-1)
    np.testing.assert_array_equal(rows.token_ids, targets)
    np.testing.assert_allclose(
        rows.logprobs, expected.gather(-1, targets[:, None])[:, 0], rtol=1e-4
    )
    best = expected.topk(4)
    np.testing.assert_array_equal(rows.top_ids, best.indices)
    np.testing.assert_allclose(rows.top_logprobs, best.values, rtol=1e-4)
    order = expected.argsort(-1, descending=True).tolist()
    ranks = [order[t].index(int(target)) + 1 for t, target in enumerate(targets)]
    assert rows.ranks.tolist() == ranks


def test_records_have_the_dtypes_of_the_step_result():
    rows = token_logprobs(torch.randn(3, 9).bfloat16(), torch.tensor([1, 2, 3]), 2).rows(1, 3, 1)
    assert (rows.token_ids.dtype, rows.ranks.dtype, rows.top_ids.dtype) == (np.int32,) * 3
    assert (rows.logprobs.dtype, rows.top_logprobs.dtype) == (np.float32,) * 2
    assert rows.token_ids.tolist() == [2, 3]
    assert rows.top_ids.shape == (2, 1)


def test_asking_for_more_than_the_vocabulary_gives_the_vocabulary():
    assert token_logprobs(torch.randn(1, 9), torch.tensor([1]), 20).top_ids_JK.shape == (1, 9)


def test_named_tokens_stand_in_place_of_the_best():
    logits = torch.randn(3, 9)
    named = torch.tensor([[7, 0, 3, 5], [-1, -1, -1, -1], [2, -1, -1, -1]])
    found = token_logprobs(logits, torch.tensor([1, 2, 3]), 4, named)
    expected = logits.log_softmax(-1)
    assert found.top_ids_JK[0].tolist() == [7, 0, 3, 5]
    assert found.top_ids_JK[1].tolist() == logits[1].topk(4).indices.tolist()
    assert found.top_ids_JK[2, 0] == 2
    torch.testing.assert_close(found.top_logprobs_JK, expected.gather(-1, found.top_ids_JK))
    wide = token_logprobs(logits, torch.tensor([1, 2, 3]), 20, named[:, [0] * 20])
    assert wide.top_ids_JK.shape == (3, 9)
