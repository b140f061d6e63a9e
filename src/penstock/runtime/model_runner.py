"""`ModelRunner`: one rank's device side of a step: plan -> batch -> forward, then logits -> tokens.

Everything is enqueued; the first to wait for the device is the handle's `wait`.
"""

# T tokens in the step, N entries that sample, L logit rows, W most of an entry, D hidden size,
# V vocabulary, E what drafters read of it, 2 a token and whether it is one, K most drafts of a row

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.config.run import RunConfig
from penstock.kernels.forward_batch import ForwardBatch
from penstock.kernels.transfer import start_copy_to_host
from penstock.layers.decoder import Decoder
from penstock.parallel.collectives import broadcast
from penstock.parallel.mesh import RankMesh
from penstock.runtime.cpu_graphs import DecodeCpuGraphs
from penstock.runtime.drafter import Drafter
from penstock.runtime.drafter_inputs import DrafterInputs, FedTokens
from penstock.runtime.graphs import DecodeGraphs, GraphPool, GraphStep, Outputs
from penstock.runtime.input_batch import Rows, StepInputs, by_token, fed_tokens
from penstock.runtime.kv_tensors import KVTensors
from penstock.runtime.mixed_graphs import MixedGraphs
from penstock.runtime.pooler import Pooled, Pooler
from penstock.runtime.prompt_logprobs import PromptScorer, PromptScores
from penstock.runtime.step_layout import StepShape
from penstock.sampling.logprobs import SampledLogprobs
from penstock.sampling.sampler import NOT_FINITE, Sampler
from penstock.sampling.verification import Accepted, DraftedRows, verify
from penstock.types.step import Int32s, LateInputs, RanAs, StepPlan, StepResult
from penstock.types.step_costs import StepCosts

_BYTES_PERIOD_S = 1.0
_NO_ROWS = np.zeros(0, np.int32)  # that want a field


@dataclass(slots=True)
class _Forwarded:
    """A step between `forward` and `sample`."""

    plan: StepPlan
    logits_LV: Tensor
    rows_L: Tensor
    kv_lens_L: Tensor
    rows: Int32s
    scores: PromptScores | None
    ran_as: RanAs
    drafted: DraftedRows | None = None
    pooled: Pooled | None = None
    fed: "_Fed | None" = None  # for a drafter that follows the step


@dataclass(slots=True)
class _Fed:
    """What a step has fed, and the hidden states that came of it, as a drafter reads them."""

    batch: ForwardBatch
    hidden_TE: Tensor | None
    logit_index_L: Tensor | None


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
        self._num_drafts_N = None
        if drafts_NK is not None:
            self._num_drafts_N = start_copy_to_host((drafts_NK >= 0).sum(1))
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
            num_drafts=self._num_drafts(sampling),
            failures=dict.fromkeys(failed, NOT_FINITE),
            ran_as=self._ran_as,
            pooled=self._pooled.rows() if self._pooled else {},
        )

    def _num_drafts(self, sampling: NDArray[np.int64]) -> Int32s | None:
        if self._num_drafts_N is None:
            return None
        num_drafts = np.zeros(self._plan.num_entries, np.int32)
        num_drafts[sampling] = self._num_drafts_N.numpy()
        return num_drafts


class ModelRunner:
    def __init__(
        self,
        model: Decoder,
        rows: Rows,
        kv: KVTensors,
        sampler: Sampler,
        mesh: RankMesh,
        drafter: Drafter | None = None,
    ) -> None:
        self._model = model
        self._cache_layers = model.cache_layers()
        self._drafter = drafter
        self._has_follower = drafter is not None and drafter.follows_steps
        self._reads_hidden = drafter is not None and drafter.reads_hidden
        self._rows = rows
        self._kv = kv
        self._sampler = sampler
        self._scorer = PromptScorer(rows, model.logits)
        self._pooler = Pooler()
        self._mesh = mesh
        self._graphs: DecodeGraphs | None = None
        self._mixed_graphs: MixedGraphs | None = None
        self._cpu_graphs: DecodeCpuGraphs | None = None
        self._forwarded: dict[int, _Forwarded] = {}
        self._device_bytes = (0.0, 0)  # until when the number counts as new, and the number
        # A bit of work that can wait, and whether there is more.
        self.when_idle: Callable[[], bool] = lambda: False
        self.before_steps: list[Callable[[], None]] = []  # the same on all ranks
        self.costs: StepCosts | None = None  # where it was measured what drafts cost

    def use_graphs(self, graphs: DecodeGraphs, mixed_graphs: MixedGraphs) -> None:
        self._graphs = graphs
        self._mixed_graphs = mixed_graphs

    def capture_drafter(self, pool: GraphPool, config: RunConfig, max_kv_len: int) -> None:
        # Data-parallel ranks do not agree on graphs of what they draft.
        if self._drafter is not None and config.mesh.dp == 1:
            sizes, may_pad = config.graph_batch_sizes, config.graph_padding
            self._drafter.capture(pool, sizes, may_pad, max_kv_len)

    def use_cpu_graphs(self, max_kv_len: int) -> None:
        self._cpu_graphs = DecodeCpuGraphs(
            lambda batch: self._model.logits(self._model(batch)), max_kv_len
        )
        if self._drafter is not None:
            self._drafter.use_cpu_graphs(max_kv_len)

    @property
    def device_bytes(self) -> int:
        """Device memory this process has taken, at most a second ago; 0 on a CPU."""
        if self._rows.device.type != "cuda":
            return 0
        # Asked after every step; torch walks through all its statistics for one of them.
        now = time.monotonic()
        if now >= self._device_bytes[0]:
            self._device_bytes = now + _BYTES_PERIOD_S, torch.cuda.memory_reserved()
        return self._device_bytes[1]

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> None:
        for turn in self.before_steps:
            turn()
        self._rows.apply(plan)
        self._scorer.join(plan.joins)
        self._pooler.join(plan.joins)
        self._kv.apply(plan.cache_ops)
        if (replayed := self._replay(plan)) is not None:
            forwarded = replayed
        elif not plan.num_entries:
            forwarded = self._padding(plan)
        elif plan.has_drafts:
            forwarded = self._run_with_drafts(plan)
        elif plan.num_decodes < plan.num_entries:
            forwarded = self._run_eager(plan, self._rows.build(plan))
        else:
            longest = int(plan.max_kv_lens.max())
            forwarded = self._decode(plan, self._rows.build_decode(plan.rows, longest))
        self._forwarded[plan.step_id] = forwarded
        # Behind the step, which need not wait for the host to tell what comes after it.
        self._sampler.join(plan.joins)
        if self._drafter is not None:
            self._drafter.join(plan.joins)

    def _replay(self, plan: StepPlan) -> _Forwarded | None:
        """By the graph that takes the step, here and on the ranks that run it with this one."""
        graphs, mixed = self._graphs, self._mixed_graphs
        if graphs is None and mixed is None:
            return None
        load = plan.load
        if load.num_chunks:
            reads_states = self._scorer.is_asked(plan) or self._pooler.is_asked(plan)
            if mixed is None or not mixed.fits(load) or reads_states:
                return None
            return self._replayed_mix(plan, plan, mixed.replay(plan, load))
        if graphs is None or load.is_eager or not graphs.fits(load.num_decodes):
            return None
        outputs = graphs.replay(plan.rows, None, load.num_decodes)
        return self._replayed(plan, plan.rows, outputs)

    def _replayed_mix(
        self, plan: StepPlan, tokens: StepPlan, outputs: Outputs, drafted: DraftedRows | None = None
    ) -> _Forwarded:
        """A step with prompts; `tokens` has each token of a decode as one of its own."""
        logits_LV, kv_lens_L, rows_L, hidden_TE = outputs
        rows, fed = tokens.rows[tokens.num_logit_rows > 0], None
        if self._follows(plan) and plan.num_entries:
            build = self._rows.build if drafted is None else self._rows.build_drafted
            inputs = build(plan, is_grown=True)
            fed = self._fed_anew(plan, inputs.batch, hidden_TE, inputs.logit_index_L)
        elif self._follows(plan):
            fed = self._fed_padding(plan, hidden_TE)
        return _Forwarded(
            plan, logits_LV, rows_L, kv_lens_L, rows, None, RanAs.GRAPH, drafted, fed=fed
        )

    def _replayed(
        self,
        plan: StepPlan,
        rows: Int32s,
        outputs: Outputs,
        offsets: Int32s | None = None,
        drafted: DraftedRows | None = None,
    ) -> _Forwarded:
        """A step of decodes."""
        logits_LV, kv_lens_L, rows_L, hidden_TE = outputs
        fed = None
        if self._follows(plan) and len(rows):
            batch = self._rows.batch_at(
                rows_L,
                kv_lens_L.long() - 1,
                int(plan.max_kv_lens.max()),
                input_ids_N=self._rows.fed_ids(rows_L, offsets),
            )
            fed = self._fed_anew(plan, batch, hidden_TE, None)
        elif self._follows(plan):
            fed = self._fed_padding(plan, hidden_TE)
        return _Forwarded(
            plan, logits_LV, rows_L, kv_lens_L, rows, None, RanAs.GRAPH, drafted, fed=fed
        )

    def _fed_anew(
        self,
        plan: StepPlan,
        batch: ForwardBatch,
        hidden_TE: Tensor | None,
        logit_index_L: Tensor | None,
    ) -> _Fed:
        """`batch`: built again of what a graph was fed."""
        if plan.peers is not None:
            batch.rank_tokens = plan.peers.num_tokens
        return _Fed(batch, hidden_TE, logit_index_L)

    def _fed_padding(self, plan: StepPlan, hidden_TE: Tensor | None) -> _Fed:
        """Of a rank without entries: the token it ran for the others."""
        rows_N = torch.tensor([self._rows.padding_row], device=self._rows.device)
        batch = self._rows.batch_at(rows_N, torch.zeros_like(rows_N), 1)
        if hidden_TE is not None:
            hidden_TE = hidden_TE.new_zeros(1, hidden_TE.shape[1])
        return self._fed_anew(plan, batch, hidden_TE, None)

    def _run_with_drafts(self, plan: StepPlan) -> _Forwarded:
        """A step in which decodes feed drafts: by a CUDA graph if one takes it."""
        graphs, mixed = self._graphs, self._mixed_graphs
        # Ranks do not agree on graphs of drafts.
        if graphs is not None and graphs.takes_drafts and plan.peers is None:
            drafted = self._rows.drafted_rows(plan)
            if plan.num_decodes == plan.num_entries:
                rows, offsets = fed_tokens(plan)
                if graphs.fits(len(rows)):
                    outputs = graphs.replay(rows, offsets)
                    return self._replayed(plan, rows, outputs, offsets, drafted)
            elif mixed is not None and not self._scorer.is_asked(plan):
                tokens = by_token(plan)
                if mixed.fits(tokens.load):
                    outputs = mixed.replay(tokens, tokens.load)
                    return self._replayed_mix(plan, tokens, outputs, drafted)
        inputs = self._rows.build_drafted(plan)
        if plan.num_decodes < plan.num_entries or inputs.batch.drafted is not None:
            return self._run_eager(plan, inputs)
        return self._decode(plan, inputs)  # every token is a decode of its own

    def _decode(self, plan: StepPlan, inputs: StepInputs) -> _Forwarded:
        """Decodes alone, which no CUDA graph takes: by a CPU graph, else eagerly."""
        is_followed = self._follows(plan)
        logits_LV = None
        if self._cpu_graphs is not None and not (is_followed and self._reads_hidden):
            logits_LV = self._cpu_graphs.run(inputs.batch)
        if logits_LV is None:
            return self._run_eager(plan, inputs)
        return _Forwarded(
            plan,
            logits_LV,
            inputs.rows_L,
            inputs.kv_lens_L,
            inputs.rows,
            None,
            RanAs.CPU_GRAPH,
            inputs.drafted,
            fed=_Fed(inputs.batch, None, inputs.logit_index_L) if is_followed else None,
        )

    def _rests(self, plan: StepPlan) -> bool:
        """Whether the drafter has no part in the step."""
        return self._has_follower and not plan.is_followed

    def _follows(self, plan: StepPlan) -> bool:
        """Whether the drafter is told what the step fed. Not the engine's `core.followers`."""
        return self._has_follower and plan.is_followed

    def _padding(self, plan: StepPlan) -> _Forwarded:
        """A step of other ranks, whose layers need this one, too."""
        padding = np.array([self._rows.padding_row], np.int32)
        inputs = self._rows.build_decode(padding, 1)
        inputs.rows, inputs.rows_L = plan.rows, inputs.rows_L[:0]
        return self._run_eager(plan, inputs)

    def _run_eager(self, plan: StepPlan, inputs: StepInputs) -> _Forwarded:
        """Eagerly, launch by launch."""
        if plan.peers is not None:
            inputs.batch.rank_tokens = plan.peers.num_tokens
        hidden_TD, hidden_TE = self._hidden(inputs.batch)
        scores = pooled = fed = None
        if self._follows(plan):
            fed = _Fed(inputs.batch, hidden_TE, inputs.logit_index_L)
        if self._mesh.is_last_stage:
            scores = self._scorer.score(plan, hidden_TD)
        if inputs.logit_index_L is not None:
            hidden_TD = hidden_TD[inputs.logit_index_L]
        logits_LV = self._model.logits(hidden_TD) if len(inputs.rows) else hidden_TD
        if self._mesh.is_last_stage:
            pooled = self._pooler.pool(plan, hidden_TD, logits_LV)
        return _Forwarded(
            plan,
            logits_LV,
            inputs.rows_L,
            inputs.kv_lens_L,
            inputs.rows,
            scores,
            RanAs.EAGER,
            inputs.drafted,
            pooled,
            fed,
        )

    def _hidden(self, batch: ForwardBatch) -> tuple[Tensor, Tensor | None]:
        """Of every token, for logits; and what the drafter reads of the step."""
        return self._model.captured(batch) if self._reads_hidden else (self._model(batch), None)

    @torch.inference_mode()
    def sample(self, step_id: int, late: LateInputs) -> DeviceStep:
        """Choose the step's tokens; they feed the next step without passing through the host."""
        step = self._forwarded.pop(step_id)
        drawn_2L, logprobs = step.rows_L.new_zeros(2, len(step.rows_L)), None
        num_accepted_N = drafts_NK = None
        if len(step.rows) and self._mesh.is_last_stage:
            if self._mesh.is_sampling_rank:
                sampled = self._sampler.sample(
                    step.logits_LV, step.rows, step.rows_L, step.kv_lens_L, late, step.drafted
                )
                drawn_2L, logprobs = sampled.drawn_2L, sampled.logprobs
            token_ids_L = broadcast(drawn_2L[0], self._mesh.role("vocab"))
            if step.drafted is None and (self._drafter is None or self._rests(step.plan)):
                self._rows.accept(step.rows_L, token_ids_L)
            else:
                num_accepted_N, drafts_NK = self._accept(step, token_ids_L)
        elif self._drafter is not None and self._follows(step.plan):
            self._drafter.draft(self._idle_inputs(step))
        return DeviceStep(
            step.plan,
            drawn_2L,
            logprobs,
            step.scores,
            step.ran_as,
            num_accepted_N,
            drafts_NK,
            step.pooled,
        )

    def _accept(self, step: _Forwarded, token_ids_L: Tensor) -> tuple[Tensor, Tensor | None]:
        """(tokens that count of each entry, what is drafted behind them)"""
        rows_N, indices_N = step.rows_L, step.kv_lens_L
        if step.drafted is None:
            accepted = Accepted(token_ids_L[:, None], torch.ones_like(token_ids_L))
            self._rows.accept(rows_N, token_ids_L)
        else:
            accepted = verify(token_ids_L, step.drafted)
            firsts_N = step.drafted.firsts()
            rows_N, indices_N = rows_N[firsts_N], indices_N[firsts_N]
            self._rows.accept_drafted(rows_N, indices_N, accepted)
            is_drafted = slice(*step.drafted.range_with_drafts)
            for layer in self._cache_layers:
                layer.accept(accepted.num_accepted_N[is_drafted])
        if self._drafter is None:
            return accepted.num_accepted_N, None
        drafts_NK = self._drafter.draft(
            self._drafter_inputs(step, rows_N, indices_N, token_ids_L, accepted)
        )
        self._rows.drafts_RK.index_copy_(0, rows_N, drafts_NK)
        return accepted.num_accepted_N, drafts_NK

    def _idle_inputs(self, step: _Forwarded) -> DrafterInputs:
        """Where nothing is drawn: a drafter keeps up. Where other ranks draft, whose layers need
        this one, too, it drafts for the padding row."""
        assert step.fed is not None
        peers, fed = step.plan.peers, step.fed
        pads = peers is not None and any(peers.num_sampling)
        rows_N = torch.full((int(pads),), self._rows.padding_row, device=self._rows.device)
        nothing_N = torch.zeros_like(rows_N)
        next_ids_T = fed.batch.input_ids_T.roll(-1)
        if (ends := self._rows.next_of_chunks(step.plan)) is not None:
            last_C, ids_C = ends
            next_ids_T[last_C] = ids_C
        return DrafterInputs(
            rows_N=rows_N,
            indices_N=nothing_N,
            token_ids_NW=nothing_N[:, None],
            num_accepted_N=nothing_N + 1,
            max_drafts=step.plan.max_drafts,
            max_kv_lens=np.ones(int(pads), np.int32),
            fed=FedTokens(
                batch=fed.batch, hidden_TE=fed.hidden_TE, next_ids_T=next_ids_T, last_N=nothing_N
            ),
            rank_rows=_rank_rows(step.plan),
        )

    def _drafter_inputs(
        self,
        step: _Forwarded,
        rows_N: Tensor,
        indices_N: Tensor,
        token_ids_L: Tensor,
        accepted: Accepted | None = None,
    ) -> DrafterInputs:
        if accepted is None:
            accepted = Accepted(token_ids_L[:, None], torch.ones_like(token_ids_L))
        fed = None
        if step.fed is not None:
            batch, index_L = step.fed.batch, step.fed.logit_index_L
            if index_L is None:
                next_ids_T, index_L = (
                    token_ids_L,
                    torch.arange(len(token_ids_L), device=rows_N.device),
                )
            else:
                next_ids_T = batch.input_ids_T.roll(-1)
                next_ids_T[index_L] = token_ids_L
                if (ends := self._rows.next_of_chunks(step.plan)) is not None:
                    last_C, ids_C = ends
                    next_ids_T[last_C] = ids_C
            first_N = index_L if step.drafted is None else index_L[step.drafted.firsts()]
            fed = FedTokens(
                batch=batch,
                hidden_TE=step.fed.hidden_TE,
                next_ids_T=next_ids_T,
                last_N=first_N + accepted.num_accepted_N - 1,
            )
        return DrafterInputs(
            rows_N=rows_N,
            indices_N=indices_N,
            token_ids_NW=accepted.token_ids_NW,
            num_accepted_N=accepted.num_accepted_N,
            max_drafts=step.plan.max_drafts,
            max_kv_lens=step.plan.max_kv_lens[step.plan.num_logit_rows > 0],
            fed=fed,
            rank_rows=_rank_rows(step.plan),
        )

    def padded_step(self, shape: StepShape, max_kv_len: int) -> GraphStep:
        """A step of any mix: everything from packed numbers to logits of as many entries as there
        are, those that the step asks for first."""

        @torch.inference_mode()
        def step(packed: Tensor, has_fields: bool) -> Outputs:
            rows = None if has_fields else _NO_ROWS
            batch, entries_N = self._rows.padded_batch(packed, shape, max_kv_len, rows)
            last_N = (batch.query_starts_N1[1:].long() - 1).clamp(min=0)[entries_N]
            hidden_TD, hidden_TE = self._hidden(batch)
            logits_NV = self._model.logits(hidden_TD[last_N])
            rows_N = batch.rows_N.long()[entries_N]
            return logits_NV, batch.kv_lens_N[entries_N], rows_N, hidden_TE

        return step

    def decode_step(self, max_kv_len: int) -> GraphStep:
        """A step of decodes: everything from row numbers to logits."""
        has_offsets = self._rows.decode_width > 1

        @torch.inference_mode()
        def step(inputs: Tensor, has_fields: bool) -> Outputs:
            rows_N, offsets_N = inputs.view(2, -1) if has_offsets else (inputs, None)
            rows = None if has_fields else _NO_ROWS
            batch = self._rows.decode_batch(rows_N, max_kv_len, rows, offsets_N)
            hidden_ND, hidden_NE = self._hidden(batch)
            return self._model.logits(hidden_ND), batch.kv_lens_N, rows_N.long(), hidden_NE

        return step


def _rank_rows(plan: StepPlan) -> tuple[int, ...] | None:
    """What `DrafterInputs.rank_rows` is in this step."""
    return None if plan.peers is None else tuple(max(1, num) for num in plan.peers.num_sampling)
