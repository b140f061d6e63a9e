"""`ModelDrafter`: drafts of a small model of the same vocabulary, which runs behind every step.

It has layers of cache among the model's own, in blocks of the same numbers. What the model was fed
passes through it, too; then it goes on alone from the newest token.
"""

# T tokens of a step, N rows that have new ones, K most drafts, S tokens of a captured run,
# 4 see `draft_graphs.py`

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.kernels.forward_batch import ForwardBatch
from penstock.layers.decoder import Decoder
from penstock.runtime.draft_graphs import TokenGraphs, columns, tokens_of
from penstock.runtime.drafter_inputs import DrafterInputs
from penstock.runtime.graphs import GraphPool
from penstock.runtime.input_batch import Rows
from penstock.types.step import RowJoin


class ModelDrafter:
    follows_steps = True

    def __init__(self, model: Decoder, rows: Rows, max_drafts: int) -> None:
        self._model, self._rows, self.max_drafts = model, rows, max_drafts
        self._follow: TokenGraphs | None = None  # behind a step of decodes
        self._next: TokenGraphs | None = None  # of a token: the one behind it

    def capture(
        self, pool: GraphPool, sizes: tuple[int, ...], may_pad: bool, max_kv_len: int
    ) -> None:
        def hidden(tokens_S4: Tensor) -> tuple[Tensor, ...]:
            rows_S, positions_S, ids_S, ends_S = columns(tokens_S4)
            batch = self._rows.batch_at(
                rows_S, positions_S, max_kv_len, input_ids_N=ids_S, ends_N=ends_S
            )
            return (self._model(batch),)

        def best(tokens_S4: Tensor) -> tuple[Tensor, ...]:
            (hidden_SD,) = hidden(tokens_S4)
            return (self._model.logits(hidden_SD).argmax(-1),)

        self._follow, self._next = (
            TokenGraphs(run, sizes, may_pad, self._rows) for run in (hidden, best)
        )
        with torch.inference_mode():
            for graphs in (self._follow, self._next):
                graphs.capture(pool, torch.float32)

    def join(self, joins: Sequence[RowJoin]) -> None:
        """Nothing is kept by row: a prompt passes through it as through the model."""

    def draft(self, step: DrafterInputs) -> Tensor:
        assert step.fed is not None
        self._keep_up(step.fed.batch)
        drafts_NK = step.rows_N.new_full((len(step.rows_N), self.max_drafts), -1)
        most = step.most_drafts(self.max_drafts)
        if not len(drafts_NK) or not most:
            return drafts_NK
        ends_N = step.block_ends(self._rows)
        token_ids_N = self._rows.last_tokens_R[step.rows_N]
        for index in range(most):
            at_N = step.newest_N + index
            if self._next is not None and self._next.fits(len(at_N)):
                (token_ids_N,) = self._next(tokens_of(step.rows_N, at_N, token_ids_N, ends_N))
            else:
                longest = step.max_kv_len + self.max_drafts
                batch = self._rows.batch_at(
                    step.rows_N, at_N, longest, input_ids_N=token_ids_N, ends_N=ends_N
                )
                batch.rank_tokens = step.rank_rows
                token_ids_N = self._model.logits(self._model(batch)).argmax(-1)
            drafts_NK[:, index] = torch.where(at_N < ends_N, token_ids_N, -1)
        return drafts_NK

    def _keep_up(self, batch: ForwardBatch) -> None:
        """Keys of what the model was fed."""
        is_decode = batch.num_decodes == batch.num_tokens
        if self._follow is not None and is_decode and self._follow.fits(batch.num_tokens):
            positions_T = batch.positions_T
            self._follow(tokens_of(batch.rows_N, positions_T, batch.input_ids_T, positions_T + 1))
        else:
            self._model(batch)
