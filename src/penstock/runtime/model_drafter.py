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
from penstock.runtime.cpu_graphs import DecodeCpuGraphs
from penstock.runtime.draft_graphs import TokenGraphs, advance, columns, tokens_of
from penstock.runtime.drafter_inputs import DrafterInputs
from penstock.runtime.graphs import GraphPool
from penstock.runtime.input_batch import Rows
from penstock.types.step import RowJoin


class ModelDrafter:
    reads_steps, reads_hidden = True, False

    def __init__(self, model: Decoder, rows: Rows, max_drafts: int) -> None:
        self._model, self._rows, self.max_drafts = model, rows, max_drafts
        self._follow: TokenGraphs | None = None  # behind a step of decodes
        self._next: TokenGraphs | None = None  # of a token: the one behind it
        self._cpu_graphs: DecodeCpuGraphs | None = None

    def capture(
        self, pool: GraphPool, sizes: tuple[int, ...], may_pad: bool, max_kv_len: int
    ) -> None:
        def follow(tokens_S4: Tensor) -> tuple[Tensor, ...]:
            return (self._model(self._batch(tokens_S4, max_kv_len)),)

        def best(tokens_S4: Tensor) -> tuple[Tensor, ...]:
            logits_SV = self._logits(self._batch(tokens_S4, max_kv_len))
            return (advance(tokens_S4, logits_SV.argmax(-1)),)

        self._follow, self._next = (
            TokenGraphs(run, sizes, may_pad, self._rows) for run in (follow, best)
        )
        with torch.inference_mode():
            for graphs in (self._follow, self._next):
                graphs.capture(pool, torch.float32)

    def use_cpu_graphs(self, max_kv_len: int) -> None:
        self._cpu_graphs = DecodeCpuGraphs(self._logits, max_kv_len)

    def join(self, joins: Sequence[RowJoin]) -> None:
        """Nothing is kept by row: a prompt passes through it as through the model."""

    def draft(self, step: DrafterInputs) -> Tensor:
        drafts_NK = step.rows_N.new_full((len(step.rows_N), self.max_drafts), -1)
        if step.fed is None:
            return drafts_NK
        self._keep_up(step.fed.batch)
        most = step.most_drafts(self.max_drafts)
        if not len(drafts_NK) or not most:
            return drafts_NK
        ends_N, count = step.block_ends(self._rows), len(drafts_NK)
        last_N = self._rows.last_tokens_R[step.rows_N]
        tokens_N4 = tokens_of(step.rows_N, step.newest_N, last_N, ends_N)
        graphs = self._next if self._next is not None and self._next.fits(count) else None
        for index in range(most):
            if graphs is None:
                batch = self._batch(tokens_N4, step.max_kv_len + self.max_drafts)
                batch.rank_tokens = step.rank_rows
                logits_NV = self._cpu_graphs.run(batch) if self._cpu_graphs is not None else None
                logits_NV = self._logits(batch) if logits_NV is None else logits_NV
                draft_N = advance(tokens_N4, logits_NV.argmax(-1))
            else:
                (draft_N,) = graphs(tokens_N4) if index == 0 else graphs.again(count)
            drafts_NK[:, index] = draft_N
        return drafts_NK

    def _batch(self, tokens_S4: Tensor, max_kv_len: int) -> ForwardBatch:
        rows_S, positions_S, ids_S, ends_S = columns(tokens_S4)
        return self._rows.batch_at(
            rows_S, positions_S, max_kv_len, input_ids_N=ids_S.clamp(min=0), ends_N=ends_S
        )

    def _keep_up(self, batch: ForwardBatch) -> None:
        """Keys of what the model was fed."""
        is_decode = batch.num_decodes == batch.num_tokens
        if self._follow is not None and is_decode and self._follow.fits(batch.num_tokens):
            positions_T = batch.positions_T
            self._follow(tokens_of(batch.rows_N, positions_T, batch.input_ids_T, positions_T + 1))
        elif not is_decode or self._cpu_graphs is None or self._cpu_graphs.run(batch) is None:
            self._model(batch)

    def _logits(self, batch: ForwardBatch) -> Tensor:
        return self._model.logits(self._model(batch))
