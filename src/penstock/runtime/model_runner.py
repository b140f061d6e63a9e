"""`ModelRunner`: one rank's device side of a step: plan -> batch -> forward, then logits -> tokens.

Everything is enqueued; the first to wait for the device is the handle's `wait`.
"""

# T tokens in the step, N entries that sample, L logit rows, D hidden size, V vocabulary,
# E what drafters read of it, 2 a token and whether it is one

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.forward_batch import ForwardBatch
from penstock.layers.decoder import Decoder
from penstock.parallel.collectives import broadcast
from penstock.parallel.mesh import RankMesh
from penstock.runtime.cpu_graphs import DecodeCpuGraphs
from penstock.runtime.device_step import DeviceStep
from penstock.runtime.drafter import Drafter
from penstock.runtime.drafting import Drafting, Drawn, Fed, Outcome
from penstock.runtime.graphs import Accept, DecodeGraphs, GraphStep, Outputs
from penstock.runtime.input_batch import Rows, StepInputs, by_token, fed_tokens
from penstock.runtime.kv_tensors import KVTensors
from penstock.runtime.mixed_graphs import MixedGraphs
from penstock.runtime.pooler import Pooled, Pooler
from penstock.runtime.prompt_logprobs import PromptScorer, PromptScores
from penstock.runtime.stage_link import StageLink
from penstock.runtime.step_layout import StepShape
from penstock.sampling.sampler import Sampler
from penstock.sampling.verification import DraftedRows
from penstock.types.step import Int32s, LateInputs, RanAs, StepPlan
from penstock.types.step_costs import StepCosts

_BYTES_PERIOD_S = 1.0
_NO_ROWS = np.zeros(0, np.int32)  # that want a field


@dataclass(slots=True, kw_only=True)
class _Forwarded:
    """A step between `forward` and `sample`."""

    plan: StepPlan
    ran_as: RanAs
    logits_LV: Tensor
    rows_L: Tensor
    kv_lens_L: Tensor
    rows: Int32s
    drafted: DraftedRows | None
    scores: PromptScores | None = None
    pooled: Pooled | None = None
    fed: Fed | None = None  # for a drafter that reads the step
    accept: Accept | None = None


def _by_graph(
    plan: StepPlan, rows: Int32s, outputs: Outputs, drafted: DraftedRows | None, fed: Fed | None
) -> _Forwarded:
    return _Forwarded(
        plan=plan,
        ran_as=RanAs.GRAPH,
        logits_LV=outputs.logits_NV,
        rows_L=outputs.rows_N,
        kv_lens_L=outputs.kv_lens_N,
        rows=rows,
        drafted=drafted,
        fed=fed,
        accept=outputs.accept,
    )


class ModelRunner:
    def __init__(
        self,
        model: Decoder,
        rows: Rows,
        kv: KVTensors,
        sampler: Sampler,
        mesh: RankMesh,
        link: StageLink,
        drafter: Drafter | None = None,
    ) -> None:
        self._model = model
        self._cache_layers = model.cache_layers()
        self._link = link
        self.drafting = Drafting(drafter, rows)
        self._rows = rows
        self._kv = kv
        self._sampler = sampler
        self._scorer = PromptScorer(rows, model.logits)
        self._pooler = Pooler()
        self._mesh = mesh
        self._graphs: DecodeGraphs | None = None
        self._plain_graphs: DecodeGraphs | None = None
        self._mixed_graphs: MixedGraphs | None = None
        self._cpu_graphs: DecodeCpuGraphs | None = None
        self._forwarded: dict[int, _Forwarded] = {}
        self._device_bytes = (0.0, 0)  # until when the number counts as new, and the number
        # A bit of work that can wait, and whether there is more.
        self.when_idle: Callable[[], bool] = lambda: False
        self.before_steps: list[Callable[[], None]] = []  # the same on all ranks
        self.costs: StepCosts | None = None  # where it was measured what drafts cost

    def use_graphs(
        self,
        graphs: DecodeGraphs,
        mixed_graphs: MixedGraphs,
        plain_graphs: DecodeGraphs | None = None,
    ) -> None:
        """`plain_graphs`: for steps that neither feed drafts nor tell a drafter; None: `graphs` are
        as plain as these."""
        self._graphs, self._plain_graphs = graphs, plain_graphs
        self._mixed_graphs = mixed_graphs

    def use_cpu_graphs(self, max_kv_len: int) -> None:
        self._cpu_graphs = DecodeCpuGraphs(
            lambda batch: self._model.logits(self._model(batch)), max_kv_len
        )
        self.drafting.use_cpu_graphs(max_kv_len)

    @property
    def device(self) -> torch.device:
        return self._rows.device

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
        self.drafting.join(plan.joins)

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
            return self._replayed_mix(plan, plan, mixed.replay(self._link, plan, load))
        if graphs is None or load.is_eager or not graphs.fits(load.num_decodes):
            return None
        plain = self._plain_graphs
        needs_hidden = self.drafting.reads_hidden and self.drafting.reads(plan)
        if plain is not None and not needs_hidden and plain.fits(load.num_decodes):
            graphs = plain
        outputs = graphs.replay(self._link, plan.rows, None, load.num_decodes)
        return self._replayed(plan, plan.rows, outputs)

    def _replayed_mix(
        self, plan: StepPlan, tokens: StepPlan, outputs: Outputs, drafted: DraftedRows | None = None
    ) -> _Forwarded:
        """A step with prompts; `tokens` has each token of a decode as one of its own."""
        rows = tokens.rows[tokens.num_logit_rows > 0]
        fed = self.drafting.fed_by_mix(plan, outputs, drafted is not None)
        return _by_graph(plan, rows, outputs, drafted, fed)

    def _replayed(
        self,
        plan: StepPlan,
        rows: Int32s,
        outputs: Outputs,
        offsets: Int32s | None = None,
        drafted: DraftedRows | None = None,
    ) -> _Forwarded:
        """A step of decodes."""
        fed = self.drafting.fed_by_decodes(plan, outputs, offsets)
        return _by_graph(plan, rows, outputs, drafted, fed)

    def _run_with_drafts(self, plan: StepPlan) -> _Forwarded:
        """A step in which decodes feed drafts: by a CUDA graph if one takes it."""
        graphs, mixed = self._graphs, self._mixed_graphs
        # Ranks do not agree on graphs of drafts.
        if graphs is not None and graphs.takes_drafts and plan.peers is None:
            drafted = self._rows.drafted_rows(plan)
            if plan.num_decodes == plan.num_entries:
                rows, offsets = fed_tokens(plan)
                if graphs.fits(len(rows)):
                    outputs = graphs.replay(self._link, rows, offsets)
                    return self._replayed(plan, rows, outputs, offsets, drafted)
            elif mixed is not None and not self._scorer.is_asked(plan):
                tokens = by_token(plan)
                if mixed.fits(tokens.load):
                    outputs = mixed.replay(self._link, tokens, tokens.load)
                    return self._replayed_mix(plan, tokens, outputs, drafted)
        inputs = self._rows.build_drafted(plan)
        if plan.num_decodes < plan.num_entries or inputs.batch.drafted is not None:
            return self._run_eager(plan, inputs)
        return self._decode(plan, inputs)  # every token is a decode of its own

    def _decode(self, plan: StepPlan, inputs: StepInputs) -> _Forwarded:
        """Decodes alone, which no CUDA graph takes: by a CPU graph, else eagerly."""
        logits_LV, is_read = None, self.drafting.reads(plan)
        if self._cpu_graphs is not None and not (is_read and self.drafting.reads_hidden):
            logits_LV = self._cpu_graphs.run(inputs.batch)
        if logits_LV is None:
            return self._run_eager(plan, inputs)
        return _Forwarded(
            plan=plan,
            ran_as=RanAs.CPU_GRAPH,
            logits_LV=logits_LV,
            rows_L=inputs.rows_L,
            kv_lens_L=inputs.kv_lens_L,
            rows=inputs.rows,
            drafted=inputs.drafted,
            fed=self.drafting.fed(plan, inputs.batch, None, inputs.logit_index_L),
        )

    def _padding(self, plan: StepPlan) -> _Forwarded:
        """A step of other ranks, whose layers need this one, too."""
        padding = np.array([self._rows.padding_row], np.int32)
        inputs = self._rows.build_decode(padding, 1)
        inputs.rows, inputs.rows_L = plan.rows, inputs.rows_L[:0]
        return self._run_eager(plan, inputs)

    def _run_eager(self, plan: StepPlan, inputs: StepInputs) -> _Forwarded:
        """Eagerly, launch by launch."""
        batch = inputs.batch
        if plan.peers is not None:
            batch.rank_tokens = plan.peers.num_tokens
        batch.received_TE = self._link.receive(self._model.context.num_own(batch))
        hidden_TD, hidden_TE = self._hidden(batch)
        self._link.send(hidden_TD)
        fed = self.drafting.fed(plan, batch, hidden_TE, inputs.logit_index_L)
        scores = pooled = None
        if self._mesh.is_last_stage:
            scores = self._scorer.score(plan, hidden_TD)
            if inputs.logit_index_L is not None:
                hidden_TD = hidden_TD[inputs.logit_index_L]
        logits_LV = self._model.logits(hidden_TD) if len(inputs.rows) else hidden_TD
        if self._mesh.is_last_stage:
            pooled = self._pooler.pool(plan, hidden_TD, logits_LV)
        return _Forwarded(
            plan=plan,
            ran_as=RanAs.EAGER,
            logits_LV=logits_LV,
            rows_L=inputs.rows_L,
            kv_lens_L=inputs.kv_lens_L,
            rows=inputs.rows,
            drafted=inputs.drafted,
            scores=scores,
            pooled=pooled,
            fed=fed,
            accept=self._accept_of(batch),
        )

    def _accept_of(self, batch: ForwardBatch) -> Accept | None:
        """For layers whose state runs through the tokens of a sequence."""
        if batch.drafted is None:
            return None

        def accept(num_accepted_N: Tensor) -> None:
            for layer in self._cache_layers:
                layer.accept(num_accepted_N)

        return accept

    def _hidden(self, batch: ForwardBatch) -> tuple[Tensor, Tensor | None]:
        """Of every token, for logits; and what the drafter reads of the step."""
        reads = self.drafting.reads_hidden
        return self._model.captured(batch) if reads else (self._model(batch), None)

    @torch.inference_mode()
    def sample(self, step_id: int, late: LateInputs) -> DeviceStep:
        """Choose the step's tokens; they feed the next step without passing through the host."""
        step = self._forwarded.pop(step_id)
        drawn_2L, logprobs = step.rows_L.new_zeros(2, len(step.rows_L)), None
        outcome = Outcome()
        if len(step.rows) and self._mesh.is_last_stage:
            if self._mesh.is_sampling_rank:
                sampled = self._sampler.sample(
                    step.logits_LV, step.rows, step.rows_L, step.kv_lens_L, late, step.drafted
                )
                drawn_2L, logprobs = sampled.drawn_2L, sampled.logprobs
            token_ids_L = broadcast(drawn_2L[0], self._mesh.role("vocab"))
            outcome = self.drafting.accept(
                Drawn(
                    plan=step.plan,
                    rows_L=step.rows_L,
                    kv_lens_L=step.kv_lens_L,
                    token_ids_L=token_ids_L,
                    drafted=step.drafted,
                    fed=step.fed,
                    accept=step.accept,
                )
            )
        else:
            self.drafting.keep_up(step.plan, step.fed)
        return DeviceStep(
            step.plan,
            drawn_2L,
            logprobs,
            step.scores,
            step.ran_as,
            num_accepted_N=outcome.num_accepted_N,
            drafts_NK=outcome.drafts_NK,
            pooled=step.pooled,
        )

    def padded_step(self, shape: StepShape, max_kv_len: int) -> GraphStep:
        """A step of any mix: everything from packed numbers to logits of as many entries as there
        are, those that the step asks for first; or from hidden states, or to them."""

        @torch.inference_mode()
        def step(packed: Tensor, has_fields: bool) -> Outputs:
            rows = None if has_fields else _NO_ROWS
            batch, entries_N = self._rows.padded_batch(packed, shape, max_kv_len, rows)
            last_N = (batch.query_starts_N1[1:].long() - 1).clamp(min=0)[entries_N]
            batch.received_TE = self._link.held(shape.num_tokens)
            hidden_TD, hidden_TE = self._hidden(batch)
            if self._mesh.is_last_stage:
                hidden_TD = hidden_TD[last_N]
            logits_NV = self._model.logits(hidden_TD)
            rows_N = batch.rows_N.long()[entries_N]
            accept = self._accept_of(batch)
            return Outputs(logits_NV, batch.kv_lens_N[entries_N], rows_N, hidden_TE, accept)

        return step

    def decode_step(self, max_kv_len: int, is_plain: bool = False) -> GraphStep:
        """A step of decodes: everything from row numbers to logits; or from hidden states, or to
        them. `is_plain`: without drafts, and nothing for a drafter."""
        has_offsets = self._rows.decode_width > 1 and not is_plain

        @torch.inference_mode()
        def step(inputs: Tensor, has_fields: bool) -> Outputs:
            rows_N, offsets_N = inputs.view(2, -1) if has_offsets else (inputs, None)
            rows = None if has_fields else _NO_ROWS
            batch = self._rows.decode_batch(rows_N, max_kv_len, rows, offsets_N)
            batch.received_TE = self._link.held(len(rows_N))
            if is_plain:
                hidden_ND, hidden_NE = self._model(batch), None
            else:
                hidden_ND, hidden_NE = self._hidden(batch)
            logits_NV, accept = self._model.logits(hidden_ND), self._accept_of(batch)
            return Outputs(logits_NV, batch.kv_lens_N, rows_N.long(), hidden_NE, accept)

        return step
