"""`HeadDrafter`: drafts of a head that reads the model's hidden states, behind every step.

The head has a layer of cache among the model's own: its keys of token t follow from the model's
hidden state there and from token t + 1, so they are written when that one is known. Keys of tokens
that were only drafted lie behind the sequence's end, and later ones take their place.

A block that is reused holds at its last token a key made with the token that followed it then, not
the one that follows now: a draft may be a little worse for it.
"""

# T tokens of a step, N rows that have new ones, K most drafts, D hidden size, E what the head reads

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from penstock.kernels.forward_batch import ForwardBatch
from penstock.runtime.drafter_inputs import DraftStep
from penstock.runtime.input_batch import Rows
from penstock.types.step import RowJoin


class DraftHead(Protocol):
    def prepared(self, hidden_TE: Tensor, batch: ForwardBatch) -> Tensor:
        """[T, D]: what the head goes on from, of the model's hidden states."""

    def __call__(
        self, embedding_TD: Tensor, hidden_TD: Tensor, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        """(what says the token behind the next one, what the head itself goes on from)"""


class HeadDrafter:
    follows_steps = True

    def __init__(
        self,
        embedded: Callable[[Tensor], Tensor],
        head: DraftHead,
        best: Callable[[Tensor], Tensor],
        rows: Rows,
        max_drafts: int,
    ) -> None:
        """`best`: the likeliest token, of what the head says."""
        self._embedded, self._head, self._best, self._rows = embedded, head, best, rows
        self.max_drafts = max_drafts

    def join(self, joins: Sequence[RowJoin]) -> None:
        """Nothing is kept by row: a prompt passes through the head as through the model."""

    def draft(self, step: DraftStep) -> Tensor:
        fed = step.fed
        assert fed is not None
        ids_T = fed.next_ids_T
        hidden_TD = self._head.prepared(fed.hidden_TE, fed.batch)
        x_TD, hidden_TD = self._head(self._embedded(ids_T), hidden_TD, fed.batch)
        drafts_NK = ids_T.new_full((len(step.rows_N), self.max_drafts), -1)
        most = step.most_drafts(self.max_drafts)
        if not len(drafts_NK) or not most:
            return drafts_NK
        hidden_ND = hidden_TD[fed.last_N]
        drafts = [self._best(x_TD[fed.last_N])]
        ends_N = step.block_ends(self._rows.block_size)
        for index in range(most - 1):
            # The token that the draft before takes the place behind of.
            at_N = step.newest_N + index
            batch = self._rows.batch_at(
                step.rows_N, at_N, step.max_kv_len + self.max_drafts, ends_N=ends_N
            )
            known_N = drafts[-1].clamp(min=0)
            x_ND, hidden_ND = self._head(self._embedded(known_N), hidden_ND, batch)
            has_room_N = (at_N < ends_N) & (drafts[-1] >= 0)
            drafts.append(torch.where(has_room_N, self._best(x_ND), -1))
        drafts_NK[:, :most] = torch.stack(drafts, dim=1)
        return drafts_NK
