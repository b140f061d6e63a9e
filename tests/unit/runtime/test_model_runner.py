"""What reaches the host of a step: tokens that count, failures, log-probabilities."""

import numpy as np
import torch

from penstock.runtime.device_step import DeviceStep
from penstock.sampling.logprobs import SampledLogprobs, TokenLogprobs
from penstock.types.step import FROM_DEVICE, BlockGrowth, RanAs, StepPlan


def step_plan(num_tokens: list[int], num_decodes: int, num_logit_rows: list[int]) -> StepPlan:
    counts, none = np.array(num_tokens, np.int32), np.zeros(0, np.int32)
    starts = np.zeros_like(counts)
    starts[:num_decodes] = FROM_DEVICE
    return StepPlan(
        step_id=7, joins=(), cache_ops=(), dp_ranks=np.zeros_like(counts),
        growth=BlockGrowth(dp_ranks=none, groups=none, rows=none, indices=none, block_ids=none),
        rows=np.arange(len(counts), dtype=np.int32), starts=starts, num_tokens=counts,
        num_logit_rows=np.array(num_logit_rows, np.int32), max_kv_lens=counts + 9,
        num_decodes=num_decodes, needs_late_inputs=False,
    )  # fmt: skip


# A decode, two with three and two tokens, a middle chunk, a last chunk.
PLAN = step_plan([1, 3, 2, 5, 4], 3, [1, 3, 2, 0, 1])
ROWS = 7
ACCEPTED = torch.tensor([1, 2, 1, 1])
TOKENS = torch.arange(10, 10 + ROWS)


def test_results_are_wide_and_chunks_that_do_not_sample_have_none():
    drafts_NK = torch.tensor([[-1, -1], [4, 5], [4, -1], [-1, -1]])
    drawn = torch.stack((TOKENS, torch.ones_like(TOKENS)))
    result = DeviceStep(PLAN, drawn, None, None, RanAs.EAGER, ACCEPTED, drafts_NK).wait()
    assert result.num_accepted.tolist() == [1, 2, 1, 0, 1]
    found = [ids[:n].tolist() for ids, n in zip(result.token_ids, result.num_accepted, strict=True)]
    assert found == [[10], [11, 12], [14], [], [16]]
    num_drafts, drafts = result.drafts()
    assert num_drafts == [0, 2, 1, 0, 0]
    assert drafts == [[-1, -1], [4, 5], [4, -1], [-1, -1], [-1, -1]]
    assert not result.failures and PLAN.has_drafts


def test_only_a_broken_row_that_counts_fails_its_request():
    for broken, failing in ((2, [1]), (3, []), (5, []), (4, [2]), (6, [4])):
        is_token = torch.ones_like(TOKENS)
        is_token[broken] = 0
        drawn = torch.stack((TOKENS, is_token))
        result = DeviceStep(PLAN, drawn, None, None, RanAs.EAGER, ACCEPTED, None).wait()
        assert list(result.failures) == failing


def test_logprobs_are_those_of_the_tokens_that_count():
    positions = np.array([1, 2, 3, 6])  # rows of logits of the second decode and the last chunk
    asked = SampledLogprobs(
        positions=positions,
        top_k=np.array([1, 1, 1, 2], np.int32),
        tokens=TokenLogprobs(
            token_ids_J=TOKENS[torch.from_numpy(positions)],
            logprobs_J=-torch.arange(4.0),
            ranks_J=torch.ones(4, dtype=torch.int64),
            top_ids_JK=torch.zeros(4, 2, dtype=torch.int64),
            top_logprobs_JK=torch.zeros(4, 2),
        ),
    )
    drawn = torch.stack((TOKENS, torch.ones_like(TOKENS)))
    result = DeviceStep(PLAN, drawn, asked, None, RanAs.EAGER, ACCEPTED, None).wait()
    assert {i: rows.token_ids.tolist() for i, rows in result.logprobs.items()} == {
        1: [11, 12],
        4: [16],
    }
    assert result.logprobs[1].top_ids.shape == (2, 1)
    assert result.logprobs[4].top_ids.shape == (1, 2)
