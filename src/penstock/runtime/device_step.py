"""`DeviceStep`: a step under way on the device, and what of it reaches the host."""

# N entries that sample, L logit rows, W most of an entry, K most drafts of a row, 2 a token and
# whether it is one

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.transfer import start_copy_to_host
from penstock.runtime.pooler import Pooled
from penstock.runtime.prompt_logprobs import PromptScores
from penstock.sampling.logprobs import SampledLogprobs
from penstock.sampling.sampler import NOT_FINITE
from penstock.types.step import Int32s, RanAs, StepPlan, StepResult


class DeviceStep:
    """A step under way. `wait` returns when its tokens have reached the host."""

    def __init__(
        self,
        plan: StepPlan,
        drawn_2L: Tensor,
        logprobs: SampledLogprobs | None,
        scores: PromptScores | None,
        ran_as: RanAs,
        num_accepted_N: Tensor | None = None,
        drafts_NK: Tensor | None = None,
        pooled: Pooled | None = None,
    ) -> None:
        """`num_accepted_N`: None, one each. `drafts_NK`: of the next step; None: nobody drafts."""
        self._plan = plan
        self._ran_as = ran_as
        self._logprobs = logprobs.start_copy() if logprobs else None
        self._scores = scores
        self._pooled = pooled
        self._drawn_2L = start_copy_to_host(drawn_2L)
        self._num_accepted_N = num_accepted_N
        if num_accepted_N is not None:
            self._num_accepted_N = start_copy_to_host(num_accepted_N)
        self._drafts_NK = None if drafts_NK is None else start_copy_to_host(drafts_NK)
        self._event: torch.cuda.Event | None = None
        if drawn_2L.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> StepResult:
        plan = self._plan  # what it says is found while the device works
        sampling = np.flatnonzero(plan.num_logit_rows)
        counts = plan.num_logit_rows[sampling]
        firsts, width = np.cumsum(counts) - counts, int(counts.max(initial=1))
        rows_NW = np.minimum(firsts[:, None] + np.arange(width), max(0, int(counts.sum()) - 1))
        num_accepted = np.minimum(plan.num_logit_rows, 1)
        token_ids = np.zeros((plan.num_entries, width), np.int32)
        if self._event is not None:
            self._event.synchronize()
        if self._num_accepted_N is not None:
            num_accepted[sampling] = self._num_accepted_N.numpy()
        drawn_L, is_token_L = self._drawn_2L.numpy()
        token_ids[sampling] = drawn_L[rows_NW]
        counts_NW = np.arange(width) < num_accepted[sampling, None]
        is_broken_N = ((is_token_L[rows_NW] == 0) & counts_NW).any(1)
        logprobs = self._logprobs.rows(firsts, num_accepted[sampling]) if self._logprobs else {}
        scores = self._scores.rows() if self._scores else {}
        failed = [*sampling[is_broken_N].tolist(), *(i for i in scores if scores[i].has_nan)]
        return StepResult(
            step_id=plan.step_id,
            token_ids=token_ids,
            num_accepted=num_accepted,
            logprobs={int(sampling[at]): rows for at, rows in logprobs.items()},
            prompt_logprobs=scores,
            draft_ids=self._draft_ids(sampling),
            failures=dict.fromkeys(failed, NOT_FINITE),
            ran_as=self._ran_as,
            pooled=self._pooled.rows() if self._pooled else {},
        )

    def _draft_ids(self, sampling: NDArray[np.int64]) -> Int32s | None:
        if self._drafts_NK is None:
            return None
        draft_ids = np.full((self._plan.num_entries, self._drafts_NK.shape[1]), -1, np.int32)
        draft_ids[sampling] = self._drafts_NK.numpy()
        return draft_ids
