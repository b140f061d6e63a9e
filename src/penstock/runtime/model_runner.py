"""`ModelRunner`: one rank's device side of a step: plan -> batch -> forward, then logits -> tokens.

Everything is enqueued; the first to wait for the device is the handle's `wait`.
"""

# T tokens in the step, N entries, L logit rows, D hidden size, V vocabulary, 2 a token and whether
# it is one

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.transfer import start_copy_to_host, to_device
from penstock.layers.decoder import Decoder
from penstock.parallel.collectives import broadcast
from penstock.parallel.mesh import RankMesh
from penstock.runtime.cpu_graphs import DecodeCpuGraphs
from penstock.runtime.graphs import CHUNK_ENTRIES, ChunkGraphs, DecodeGraphs, GraphStep, Outputs
from penstock.runtime.input_batch import Rows, StepInputs
from penstock.runtime.kv_tensors import KVTensors
from penstock.runtime.prompt_logprobs import PromptScorer, PromptScores
from penstock.sampling.logprobs import SampledLogprobs
from penstock.sampling.sampler import NOT_FINITE, Sampler
from penstock.types.step import Int32s, LateInputs, StepPlan, StepResult


@dataclass(slots=True)
class _Forwarded:
    plan: StepPlan
    logits_LV: Tensor
    rows_L: Tensor
    kv_lens_L: Tensor
    rows: Int32s
    scores: PromptScores | None


class DeviceStep:
    """A step under way. `wait` returns when its tokens have reached the host."""

    def __init__(
        self,
        plan: StepPlan,
        drawn_2L: Tensor,
        logprobs: SampledLogprobs | None,
        scores: PromptScores | None,
    ) -> None:
        self._plan = plan
        self._logprobs = logprobs.start_copy() if logprobs else None
        self._scores = scores
        self._drawn_2L = start_copy_to_host(drawn_2L)
        self._event: torch.cuda.Event | None = None
        if drawn_2L.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> StepResult:
        if self._event is not None:
            self._event.synchronize()
        sampling = np.flatnonzero(self._plan.num_logit_rows)
        token_ids = np.zeros((self._plan.num_entries, 1), np.int32)
        token_ids[sampling, 0], is_token = self._drawn_2L.numpy()
        logprobs = self._logprobs.rows() if self._logprobs else {}
        scores = self._scores.rows() if self._scores else {}
        failed = [*sampling[is_token == 0].tolist(), *(i for i in scores if scores[i].has_nan)]
        return StepResult(
            step_id=self._plan.step_id,
            token_ids=token_ids,
            num_accepted=np.minimum(self._plan.num_logit_rows, 1),
            logprobs={int(sampling[at]): rows for at, rows in logprobs.items()},
            prompt_logprobs=scores,
            failures=dict.fromkeys(failed, NOT_FINITE),
        )


class ModelRunner:
    def __init__(
        self,
        model: Decoder,
        rows: Rows,
        kv: KVTensors,
        sampler: Sampler,
        mesh: RankMesh,
    ) -> None:
        self._model = model
        self._rows = rows
        self._kv = kv
        self._sampler = sampler
        self._scorer = PromptScorer(rows, model.logits)
        self._mesh = mesh
        self._graphs: DecodeGraphs | None = None
        self._chunk_graphs: ChunkGraphs | None = None
        self._cpu_graphs: DecodeCpuGraphs | None = None
        self._forwarded: dict[int, _Forwarded] = {}

    def use_graphs(self, graphs: DecodeGraphs, chunk_graphs: ChunkGraphs | None) -> None:
        self._graphs = graphs
        self._chunk_graphs = chunk_graphs

    def use_cpu_graphs(self, max_kv_len: int) -> None:
        self._cpu_graphs = DecodeCpuGraphs(
            lambda batch: self._model.logits(self._model(batch)), max_kv_len
        )

    @property
    def num_graph_replays(self) -> int:
        return self._graphs.num_replays if self._graphs else 0

    @property
    def device_bytes(self) -> int:
        """Device memory this process has taken; 0 on a CPU."""
        return torch.cuda.memory_reserved() if self._rows.device.type == "cuda" else 0

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> None:
        self._rows.apply(plan)
        self._sampler.join(plan.joins)
        self._scorer.join(plan.joins)
        self._kv.apply(plan.cache_ops)
        if plan.num_decodes < plan.num_entries:
            forwarded = self._chunks(plan)
        elif self._graphs is not None and self._graphs.fits(plan.num_entries):
            logits_LV, kv_lens_L, rows_L = self._graphs.replay(plan.rows)
            forwarded = _Forwarded(plan, logits_LV, rows_L, kv_lens_L, plan.rows, None)
        else:
            forwarded = self._decode(plan)
        self._forwarded[plan.step_id] = forwarded

    def _chunks(self, plan: StepPlan) -> _Forwarded:
        graphs = self._chunk_graphs
        if graphs is None or not graphs.fits(plan) or self._scorer.is_asked(plan):
            return self._run(plan, self._rows.build(plan))
        sampling = np.flatnonzero(plan.num_logit_rows)
        logits_NV, kv_lens_N, rows_N = graphs.replay(plan)
        if len(sampling) == plan.num_entries:  # the first of the graph's
            picked: slice | Tensor = slice(len(sampling))
        else:
            picked = to_device(sampling, self._rows.device)
        return _Forwarded(
            plan, logits_NV[picked], rows_N[picked], kv_lens_N[picked], plan.rows[sampling], None
        )

    def _decode(self, plan: StepPlan) -> _Forwarded:
        inputs = self._rows.build_decode(plan.rows, int(plan.max_kv_lens.max()))
        logits_LV = self._cpu_graphs.logits(inputs.batch) if self._cpu_graphs is not None else None
        if logits_LV is None:
            return self._run(plan, inputs)
        return _Forwarded(plan, logits_LV, inputs.rows_L, inputs.kv_lens_L, inputs.rows, None)

    def _run(self, plan: StepPlan, inputs: StepInputs) -> _Forwarded:
        hidden_TD = self._model(inputs.batch)
        scores = self._scorer.score(plan, hidden_TD)
        if inputs.logit_index_L is not None:
            hidden_TD = hidden_TD[inputs.logit_index_L]
        logits_LV = self._model.logits(hidden_TD) if len(inputs.rows) else hidden_TD
        return _Forwarded(plan, logits_LV, inputs.rows_L, inputs.kv_lens_L, inputs.rows, scores)

    @torch.inference_mode()
    def sample(self, step_id: int, late: LateInputs) -> DeviceStep:
        """Choose the step's tokens; they feed the next step without passing through the host."""
        step = self._forwarded.pop(step_id)
        drawn_2L, logprobs = step.rows_L.new_zeros(2, len(step.rows_L)), None
        if len(step.rows):
            if self._mesh.is_sampling_rank:
                sampled = self._sampler.sample(
                    step.logits_LV, step.rows, step.rows_L, step.kv_lens_L
                )
                drawn_2L, logprobs = sampled.drawn_2L, sampled.logprobs
            token_ids_L = broadcast(drawn_2L[0], self._mesh.role("vocab"))
            self._rows.accept(step.rows_L, token_ids_L)
        return DeviceStep(step.plan, drawn_2L, logprobs, step.scores)

    def chunk_step(self, max_kv_len: int) -> GraphStep:
        """A step of prompt chunks: everything from packed numbers to logits of all entries."""

        @torch.inference_mode()
        def step(packed: Tensor) -> Outputs:
            batch = self._rows.chunk_batch(packed, CHUNK_ENTRIES, max_kv_len)
            # Of an entry without tokens the first one's: nobody looks at the result.
            last_N = (batch.query_starts_N1[1:].long() - 1).clamp(min=0)
            logits_NV = self._model.logits(self._model(batch)[last_N])
            return logits_NV, batch.kv_lens_N, batch.rows_N.long()

        return step

    def decode_step(self, max_kv_len: int) -> GraphStep:
        """A step of decodes: everything from row numbers to logits."""

        @torch.inference_mode()
        def step(rows_N: Tensor) -> Outputs:
            batch = self._rows.decode_batch(rows_N, max_kv_len)
            return self._model.logits(self._model(batch)), batch.kv_lens_N, rows_N.long()

        return step
