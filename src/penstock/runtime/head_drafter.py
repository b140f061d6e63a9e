"""`HeadDrafter`: drafts of a head that reads the model's hidden states, behind every step.

The head has a layer of cache among the model's own: its keys of token t follow from the model's
hidden state there and from token t + 1, so they are written when that one is known. Keys of tokens
that were only drafted lie behind the sequence's end, and later ones take their place.

A block that is reused holds at its last token a key made with the token that followed it then, not
the one that follows now: a draft may be a little worse for it.
"""

# T tokens of a step, N rows that have new ones, K most drafts, D hidden size, E what a head reads,
# S tokens of a captured run, 4 see `draft_graphs.py`

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from penstock.kernels.forward_batch import ForwardBatch
from penstock.runtime.draft_graphs import TokenGraphs, advance, columns, tokens_of
from penstock.runtime.drafter_inputs import DrafterInputs, FedTokens
from penstock.runtime.graphs import GraphPool
from penstock.runtime.input_batch import Rows
from penstock.types.step import RowJoin


class DraftHead(Protocol):
    read_size: int  # E
    hidden_size: int  # D

    def prepared(self, hidden_TE: Tensor, batch: ForwardBatch) -> Tensor:
        """[T, D]: what the head goes on from, of the model's hidden states."""

    def __call__(
        self, embedding_TD: Tensor, hidden_TD: Tensor, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        """(what says the token behind the next one, what the head itself goes on from)"""


class HeadDrafter:
    reads_steps = reads_hidden = True

    def __init__(
        self,
        embedded: Callable[[Tensor], Tensor],
        head: DraftHead,
        best: Callable[[Tensor], Tensor],
        rows: Rows,
        max_drafts: int,
        dtype: torch.dtype,
    ) -> None:
        """`best`: the likeliest token, of what the head says. `dtype`: of hidden states."""
        self._embedded, self._head, self._best, self._rows = embedded, head, best, rows
        self.max_drafts, self._dtype = max_drafts, dtype
        self._first: TokenGraphs | None = None  # behind a step of decodes
        self._further: TokenGraphs | None = None  # of tokens that were drafted

    def capture(
        self, pool: GraphPool, sizes: tuple[int, ...], may_pad: bool, max_kv_len: int
    ) -> None:
        def first(tokens_S4: Tensor, hidden_SE: Tensor) -> tuple[Tensor, ...]:
            rows_S, positions_S, ids_S, ends_S = columns(tokens_S4)
            batch = self._rows.batch_at(rows_S, positions_S, max_kv_len, ends_N=ends_S)
            hidden_SD = self._head.prepared(hidden_SE, batch)
            x_SD, hidden_SD = self._head(self._embedded(ids_S), hidden_SD, batch)
            return self._best(x_SD), hidden_SD

        def further(tokens_S4: Tensor, hidden_SD: Tensor) -> tuple[Tensor, ...]:
            return (self._next(tokens_S4, hidden_SD, max_kv_len),)

        head, given = self._head, (sizes, may_pad, self._rows)
        self._first = TokenGraphs(first, *given, head.read_size)
        self._further = TokenGraphs(further, *given, head.hidden_size)
        with torch.inference_mode():
            for graphs in (self._first, self._further):
                graphs.capture(pool, self._dtype)

    def use_cpu_graphs(self, max_kv_len: int) -> None:
        """None: not all of its ops are native."""

    def join(self, joins: Sequence[RowJoin]) -> None:
        """Nothing is kept by row: a prompt passes through the head as through the model."""

    def draft(self, step: DrafterInputs) -> Tensor:
        most = step.most_drafts(self.max_drafts)
        drafts_NK = step.rows_N.new_full((len(step.rows_N), self.max_drafts), -1)
        if step.fed is None:
            return drafts_NK
        draft_N, hidden_ND = self._behind(step.fed, is_asked=most > 0)
        if not len(drafts_NK) or draft_N is None:
            return drafts_NK
        drafts_NK[:, 0] = draft_N
        if most == 1:
            return drafts_NK
        ends_N, count = step.block_ends(self._rows), len(drafts_NK)
        tokens_N4 = tokens_of(step.rows_N, step.newest_N, draft_N, ends_N)
        graphs = self._further if self._further is not None and self._further.fits(count) else None
        for index in range(1, most):
            if graphs is None:
                longest = step.max_kv_len + self.max_drafts
                draft_N = self._next(tokens_N4, hidden_ND, longest, step.rank_rows)
            else:
                begins = index == 1
                (draft_N,) = graphs(tokens_N4, hidden_ND) if begins else graphs.again(count)
            drafts_NK[:, index] = draft_N
        return drafts_NK

    def _next(
        self,
        tokens_S4: Tensor,
        hidden_SD: Tensor,
        max_kv_len: int,
        rank_rows: tuple[int, ...] | None = None,
    ) -> Tensor:
        """The draft behind each token, which becomes that token; so do its hidden states."""
        rows_S, positions_S, ids_S, ends_S = columns(tokens_S4)
        batch = self._rows.batch_at(rows_S, positions_S, max_kv_len, ends_N=ends_S)
        batch.rank_tokens = rank_rows
        x_SD, new_SD = self._head(self._embedded(ids_S.clamp(min=0)), hidden_SD, batch)
        hidden_SD.copy_(new_SD)
        return advance(tokens_S4, self._best(x_SD))

    def _behind(self, fed: FedTokens, is_asked: bool) -> tuple[Tensor | None, Tensor]:
        """Keys of what was fed; (the first draft of each row, if asked, and what to go on from)"""
        batch, ids_T, hidden_TE = fed.batch, fed.next_ids_T, fed.hidden_TE
        assert hidden_TE is not None
        is_decode = batch.num_decodes == batch.num_tokens
        if self._first is not None and is_decode and self._first.fits(batch.num_tokens):
            positions_T = batch.positions_T
            tokens_T4 = tokens_of(batch.rows_N, positions_T, ids_T, positions_T + 1)
            draft_T, hidden_TD = self._first(tokens_T4, hidden_TE)
            # Copies: the next draft's graph may write where this one did.
            return draft_T[fed.last_N] if is_asked else None, hidden_TD[fed.last_N]
        hidden_TD = self._head.prepared(hidden_TE, batch)
        x_TD, hidden_TD = self._head(self._embedded(ids_T), hidden_TD, batch)
        return self._best(x_TD[fed.last_N]) if is_asked else None, hidden_TD[fed.last_N]
