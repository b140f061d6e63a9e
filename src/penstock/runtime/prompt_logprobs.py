"""Log-probabilities of prompt tokens, for the rows that asked: read from a step's hidden states."""

# T tokens in the step, J positions scored, D hidden size, V vocabulary

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from penstock.runtime.input_batch import Rows, all_to_device
from penstock.sampling.logprobs import TokenLogprobs, prompt_logprobs
from penstock.types.step import LogprobRows, RowJoin, StepPlan


@dataclass(slots=True)
class PromptScores:
    """Of one step: entry -> its stretch of the scored positions, alternatives wanted."""

    stretches: dict[int, tuple[int, int, int]]
    tokens: TokenLogprobs

    def rows(self) -> dict[int, LogprobRows]:
        return {
            entry: self.tokens.rows(start, stop, top_k)
            for entry, (start, stop, top_k) in self.stretches.items()
        }


class PromptScorer:
    def __init__(self, rows: Rows, logits: Callable[[Tensor], Tensor]) -> None:
        self._rows = rows
        self._logits = logits
        self._asked: dict[int, tuple[int, int]] = {}  # row -> (alternatives, prompt tokens)

    def join(self, joins: Sequence[RowJoin]) -> None:
        for join in joins:
            self._asked.pop(join.row, None)
            if join.sampling.prompt_logprobs is not None:
                self._asked[join.row] = (join.sampling.prompt_logprobs, join.num_prompt)

    def is_asked(self, plan: StepPlan) -> bool:
        """Whether a prompt of this step has asked."""
        if not self._asked:
            return False
        return any(row in self._asked for row in plan.rows[plan.num_decodes :].tolist())

    def score(self, plan: StepPlan, hidden_TD: Tensor) -> PromptScores | None:
        """What each prompt position of this step says about the prompt token after it."""
        if not self._asked:
            return None
        first_tokens = np.cumsum(plan.num_tokens) - plan.num_tokens
        stretches: dict[int, tuple[int, int, int]] = {}
        positions, targets, num_scored = [], [], 0
        for i in range(plan.num_decodes, plan.num_entries):
            row, start = int(plan.rows[i]), int(plan.starts[i])
            if row not in self._asked:
                continue
            top_k, num_prompt = self._asked[row]
            count = max(0, min(int(plan.num_tokens[i]), num_prompt - 1 - start))
            positions.append(np.arange(first_tokens[i], first_tokens[i] + count, dtype=np.int32))
            targets.append(self._rows.prefill_ids(row)[start + 1 : start + 1 + count])
            stretches[i] = (num_scored, num_scored + count, top_k)
            num_scored += count
        if not num_scored:
            return None
        positions_J, targets_J = all_to_device(
            [np.concatenate(positions), np.concatenate(targets)], self._rows.device
        )
        most = max(top_k for _, _, top_k in stretches.values())
        tokens = prompt_logprobs(
            hidden_TD[positions_J.long()], targets_J.long(), self._logits, most
        )
        return PromptScores(stretches, tokens.start_copy())
