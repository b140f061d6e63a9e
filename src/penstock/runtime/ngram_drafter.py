"""`NGramDrafter`: what followed the last tokens when the sequence held them before.

It looks at the sequence's own tokens alone: nothing of one request reaches another.
"""

# R device rows (the last one is padding), T tokens a row has room for, N rows of a step, W most new
# tokens of a row, K most drafts

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from penstock.config.run import NGramDrafting
from penstock.kernels.ngram import ngram_drafts
from penstock.kernels.transfer import to_device
from penstock.runtime.drafter_inputs import DrafterInputs
from penstock.runtime.graphs import GraphPool
from penstock.types.step import RowJoin


class NGramDrafter:
    reads_steps = reads_hidden = False

    def __init__(
        self, max_rows: int, max_seq_len: int, drafting: NGramDrafting, device: torch.device
    ) -> None:
        self.max_drafts = drafting.max_drafts
        self._drafting = drafting
        # Rejected tokens are written, too, behind those that count.
        width = max_seq_len + drafting.max_drafts + 1
        self._history_RT = torch.zeros(max_rows + 1, width, dtype=torch.int32, device=device)

    def capture(
        self, pool: GraphPool, sizes: tuple[int, ...], may_pad: bool, max_kv_len: int
    ) -> None:
        """Nothing: it is one kernel."""

    def use_cpu_graphs(self, max_kv_len: int) -> None:
        """Nothing either."""

    def join(self, joins: Sequence[RowJoin]) -> None:
        for join in joins:
            token_ids = np.ascontiguousarray(join.token_ids)
            self._history_RT[join.row, : len(token_ids)].copy_(
                to_device(token_ids, self._history_RT.device), non_blocking=True
            )

    def draft(self, step: DrafterInputs) -> Tensor:
        # One index into all rows: a step takes it for each decode, drafts or not.
        at_NW = (step.rows_N * self._history_RT.shape[1] + step.indices_N)[:, None]
        if (width := step.token_ids_NW.shape[1]) > 1:
            at_NW = at_NW + torch.arange(width, device=at_NW.device)
        self._history_RT.view(-1).index_copy_(0, at_NW.view(-1), step.token_ids_NW.int().view(-1))
        if step.max_drafts == 0:
            return step.rows_N.new_full((len(step.rows_N), self.max_drafts), -1)
        return ngram_drafts(
            self._history_RT,
            step.rows_N,
            step.indices_N + step.num_accepted_N,
            step.max_kv_len + 1,  # with the newest token, whose cache is not written
            self._drafting.max_size,
            self.max_drafts,
            self._drafting.use_oldest,
        )
