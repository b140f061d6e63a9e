"""`ModelDrafter`: drafts of a small model of the same vocabulary, which runs behind every step.

It has layers of cache among the model's own, in blocks of the same numbers. What the model was fed
passes through it, too; then it goes on alone from the newest token.
"""

# T tokens of a step, N rows that have new ones, K most drafts

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.layers.decoder import Decoder
from penstock.runtime.drafter_inputs import DraftStep
from penstock.runtime.input_batch import Rows
from penstock.types.step import RowJoin


class ModelDrafter:
    follows_steps = True

    def __init__(self, model: Decoder, rows: Rows, max_drafts: int) -> None:
        self._model, self._rows, self.max_drafts = model, rows, max_drafts

    def join(self, joins: Sequence[RowJoin]) -> None:
        """Nothing is kept by row: a prompt passes through it as through the model."""

    def draft(self, step: DraftStep) -> Tensor:
        assert step.fed is not None
        self._model(step.fed.batch)
        drafts_NK = step.rows_N.new_full((len(step.rows_N), self.max_drafts), -1)
        most = step.most_drafts(self.max_drafts)
        if not len(drafts_NK) or not most:
            return drafts_NK
        ends_N = step.block_ends(self._rows.block_size)
        token_ids_N = self._rows.last_tokens_R[step.rows_N]
        for index in range(most):
            at_N = step.newest_N + index
            batch = self._rows.batch_at(
                step.rows_N,
                at_N,
                step.max_kv_len + self.max_drafts,
                input_ids_N=token_ids_N,
                ends_N=ends_N,
            )
            token_ids_N = self._model.logits(self._model(batch)).argmax(-1)
            drafts_NK[:, index] = torch.where(at_N < ends_N, token_ids_N, -1)
        return drafts_NK
