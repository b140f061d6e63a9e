"""`Drafting`: a `Drafter` at work beside a runner: what a step has fed, as it reads it, and which
of the drawn tokens count.

Without a drafter every step draws one token an entry, and nothing here costs anything.
"""

# T tokens of a step, N entries that sample, L logit rows, E what drafters read of hidden states,
# K most drafts of a row, C chunks that do not reach the end of their prompt

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from penstock.config.run import RunConfig
from penstock.kernels.forward_batch import ForwardBatch
from penstock.runtime.drafter import Drafter
from penstock.runtime.drafter_inputs import DrafterInputs, FedTokens
from penstock.runtime.graphs import Accept, GraphPool, Outputs
from penstock.runtime.input_batch import Rows
from penstock.sampling.verification import Accepted, DraftedRows, verify
from penstock.types.step import Int32s, RowJoin, StepPlan


@dataclass(frozen=True, slots=True)
class Fed:
    """What a step has fed, and the hidden states that came of it, as a drafter reads them."""

    batch: ForwardBatch
    hidden_TE: Tensor | None
    logit_index_L: Tensor | None  # None: every token has logits


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """What a step has drawn, by row of logits."""

    plan: StepPlan
    rows_L: Tensor  # int64
    kv_lens_L: Tensor  # int32: the index of each token
    token_ids_L: Tensor
    drafted: DraftedRows | None  # None: one row of logits an entry
    fed: Fed | None
    accept: Accept | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """`num_accepted_N`: None, one each. `drafts_NK`: of the next step; None: nobody drafts."""

    num_accepted_N: Tensor | None = None
    drafts_NK: Tensor | None = None


def _fed(batch: ForwardBatch, hidden_TE: Tensor | None, logit_index_L: Tensor | None) -> Fed:
    """What drafts has no adapters, and its MLPs gather none: ranks without entries know of none."""
    return Fed(replace(batch, adapters=None), hidden_TE, logit_index_L)


class Drafting:
    def __init__(self, drafter: Drafter | None, rows: Rows) -> None:
        self.drafter = drafter
        self.reads_hidden = drafter is not None and drafter.reads_hidden
        self._reads_steps = drafter is not None and drafter.reads_steps
        self._rows = rows

    def capture(self, pool: GraphPool, config: RunConfig, max_kv_len: int) -> None:
        # Data-parallel ranks do not agree on graphs of what they draft.
        if self.drafter is not None and config.mesh.dp == 1:
            sizes, may_pad = config.graph_batch_sizes, config.graph_padding
            self.drafter.capture(pool, sizes, may_pad, max_kv_len)

    def use_cpu_graphs(self, max_kv_len: int) -> None:
        if self.drafter is not None:
            self.drafter.use_cpu_graphs(max_kv_len)

    def join(self, joins: Sequence[RowJoin]) -> None:
        if self.drafter is not None:
            self.drafter.join(joins)

    # What a step has fed

    def reads(self, plan: StepPlan) -> bool:
        """Whether the drafter is told what the step fed."""
        return self._reads_steps and plan.is_followed

    def fed(
        self,
        plan: StepPlan,
        batch: ForwardBatch,
        hidden_TE: Tensor | None,
        logit_index_L: Tensor | None,
    ) -> Fed | None:
        return _fed(batch, hidden_TE, logit_index_L) if self.reads(plan) else None

    def fed_by_mix(self, plan: StepPlan, outputs: Outputs, has_drafts: bool) -> Fed | None:
        """By a graph of a step with prompts: the batch is built again, of what it was fed."""
        if not self.reads(plan):
            return None
        hidden_TE = outputs.hidden_TE
        if not plan.num_entries:
            return self._padding(plan, hidden_TE)
        build = self._rows.build_drafted if has_drafts else self._rows.build
        inputs = build(plan, is_grown=True)
        return self._fed_anew(plan, inputs.batch, hidden_TE, inputs.logit_index_L)

    def fed_by_decodes(
        self, plan: StepPlan, outputs: Outputs, offsets: Int32s | None
    ) -> Fed | None:
        """The same of decodes alone; `offsets` as `Rows.fed_ids` takes them."""
        if not self.reads(plan):
            return None
        kv_lens_L, rows_L, hidden_TE = outputs.kv_lens_N, outputs.rows_N, outputs.hidden_TE
        if not len(rows_L):
            return self._padding(plan, hidden_TE)
        batch = self._rows.batch_at(
            rows_L,
            kv_lens_L.long() - 1,
            int(plan.max_kv_lens.max()),
            input_ids_N=self._rows.fed_ids(rows_L, offsets),
        )
        return self._fed_anew(plan, batch, hidden_TE, None)

    def _fed_anew(
        self,
        plan: StepPlan,
        batch: ForwardBatch,
        hidden_TE: Tensor | None,
        logit_index_L: Tensor | None,
    ) -> Fed:
        if plan.peers is not None:
            batch.rank_tokens = plan.peers.num_tokens
        return _fed(batch, hidden_TE, logit_index_L)

    def _padding(self, plan: StepPlan, hidden_TE: Tensor | None) -> Fed:
        """Of a rank without entries: the token it ran for the others."""
        rows_N = torch.tensor([self._rows.padding_row], device=self._rows.device)
        batch = self._rows.batch_at(rows_N, torch.zeros_like(rows_N), 1)
        if hidden_TE is not None:
            hidden_TE = hidden_TE.new_zeros(1, hidden_TE.shape[1])
        return self._fed_anew(plan, batch, hidden_TE, None)

    # What counts of it

    def accept(self, drawn: Drawn) -> Outcome:
        """Rows go on from what counts, and have drafts behind it."""
        rests = self._reads_steps and not drawn.plan.is_followed
        if drawn.drafted is None and (self.drafter is None or rests):
            self._rows.accept(drawn.rows_L, drawn.token_ids_L)
            if drawn.accept is not None:
                drawn.accept(torch.ones_like(drawn.token_ids_L))
            return Outcome()
        rows_N, indices_N = drawn.rows_L, drawn.kv_lens_L
        if drawn.drafted is None:
            token_ids_L = drawn.token_ids_L
            accepted = Accepted(token_ids_L[:, None], torch.ones_like(token_ids_L))
            self._rows.accept(rows_N, token_ids_L)
        else:
            accepted = verify(drawn.token_ids_L, drawn.drafted)
            firsts_N = drawn.drafted.firsts()
            rows_N, indices_N = rows_N[firsts_N], indices_N[firsts_N]
            self._rows.accept_drafted(rows_N, indices_N, accepted)
        if drawn.accept is not None:  # before a graph of drafts takes the memory
            drawn.accept(accepted.num_accepted_N)
        num_accepted_N = None if drawn.drafted is None else accepted.num_accepted_N
        if self.drafter is None:
            return Outcome(num_accepted_N)
        drafts_NK = self.drafter.draft(self._inputs(drawn, rows_N, indices_N, accepted))
        if drawn.plan.max_drafts == 0:  # it only kept up
            return Outcome(num_accepted_N)
        self._rows.drafts_RK.index_copy_(0, rows_N, drafts_NK)
        return Outcome(num_accepted_N, drafts_NK)

    def keep_up(self, plan: StepPlan, fed: Fed | None) -> None:
        """Where nothing is drawn. Where other ranks draft, whose layers need this one, too, it
        drafts for the padding row."""
        if self.drafter is None or not self.reads(plan):
            return
        assert fed is not None
        peers = plan.peers
        pads = peers is not None and any(peers.num_sampling)
        rows_N = torch.full((int(pads),), self._rows.padding_row, device=self._rows.device)
        nothing_N = torch.zeros_like(rows_N)
        inputs = DrafterInputs(
            rows_N=rows_N,
            indices_N=nothing_N,
            token_ids_NW=nothing_N[:, None],
            num_accepted_N=nothing_N + 1,
            max_drafts=plan.max_drafts,
            max_kv_lens=np.ones(int(pads), np.int32),
            fed=FedTokens(
                batch=fed.batch,
                hidden_TE=fed.hidden_TE,
                next_ids_T=self._next_ids(plan, fed.batch),
                last_N=nothing_N,
                chunk_rows=plan.rows[plan.num_decodes :],
            ),
            rank_rows=_rank_rows(plan),
        )
        self.drafter.draft(inputs)

    def _inputs(
        self, drawn: Drawn, rows_N: Tensor, indices_N: Tensor, accepted: Accepted
    ) -> DrafterInputs:
        plan, fed = drawn.plan, None
        if drawn.fed is not None:
            batch, index_L = drawn.fed.batch, drawn.fed.logit_index_L
            next_ids_T = drawn.token_ids_L
            if index_L is None:
                index_L = torch.arange(len(next_ids_T), device=rows_N.device)
            else:
                next_ids_T = self._next_ids(plan, batch, (index_L, drawn.token_ids_L))
            first_N = index_L if drawn.drafted is None else index_L[drawn.drafted.firsts()]
            fed = FedTokens(
                batch=batch,
                hidden_TE=drawn.fed.hidden_TE,
                next_ids_T=next_ids_T,
                last_N=first_N + accepted.num_accepted_N - 1,
                chunk_rows=plan.rows[plan.num_decodes :],
            )
        return DrafterInputs(
            rows_N=rows_N,
            indices_N=indices_N,
            token_ids_NW=accepted.token_ids_NW,
            num_accepted_N=accepted.num_accepted_N,
            max_drafts=plan.max_drafts,
            max_kv_lens=plan.max_kv_lens[plan.num_logit_rows > 0],
            fed=fed,
            rank_rows=_rank_rows(plan),
        )

    def _next_ids(
        self, plan: StepPlan, batch: ForwardBatch, drawn: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """What follows each token of the step: the next one of its prompt, or what was drawn."""
        next_ids_T = batch.input_ids_T.roll(-1)
        if drawn is not None:
            index_L, token_ids_L = drawn
            next_ids_T[index_L] = token_ids_L
        if (ends := self._rows.next_of_chunks(plan)) is not None:
            last_C, ids_C = ends
            next_ids_T[last_C] = ids_C
        return next_ids_T


def _rank_rows(plan: StepPlan) -> tuple[int, ...] | None:
    """What `DrafterInputs.rank_rows` is in this step."""
    return None if plan.peers is None else tuple(max(1, num) for num in plan.peers.num_sampling)
