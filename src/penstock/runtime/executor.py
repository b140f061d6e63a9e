"""`RankExecutor`: runs plans on this rank and sends them to the others, in the same order.

Where ranks have sequences of their own (`MeshShape.dp`), each gets its part of the plan. Where they
have other layers (`MeshShape.pp`), the last ones sample, and the first are told what to feed.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from penstock import log
from penstock.ipc.channel import Peer
from penstock.ipc.messages import Forward, SampleTokens
from penstock.runtime.device_step import DeviceStep
from penstock.runtime.model_runner import ModelRunner
from penstock.runtime.rank_parts import RankPart, join_results, split_late, split_plan
from penstock.types.mesh import MeshShape
from penstock.types.step import Int32s, LateInputs, StepPlan, StepResult

_log = log.get(__name__)


class FailedStep:
    """A step that did not run; its requests fail, the engine goes on."""

    def __init__(self, plan: StepPlan, message: str) -> None:
        self._plan = plan
        self._message = message

    def wait(self) -> StepResult:
        return StepResult(
            step_id=self._plan.step_id,
            token_ids=np.zeros((self._plan.num_entries, 1), np.int32),
            num_accepted=np.zeros(self._plan.num_entries, np.int32),
            logprobs={},
            prompt_logprobs={},
            error=self._message,
        )


class JoinedStep:
    """A step that other ranks sample for, too. `own`: what this rank samples itself, if it does."""

    def __init__(
        self,
        plan: StepPlan,
        parts: Sequence[RankPart],
        own: DeviceStep | None,
        others: Callable[[int], list[StepResult]],
        on_result: Callable[[StepPlan, StepResult], None],
    ) -> None:
        self._plan, self._parts, self._own, self._others = plan, parts, own, others
        self._on_result = on_result

    def wait(self) -> StepResult:
        results = [] if self._own is None else [self._own.wait()]
        results += self._others(self._plan.step_id)
        result = join_results(self._plan, self._parts, results)
        self._on_result(self._plan, result)
        return result


def _no_results(step_id: int) -> list[StepResult]:
    return []


class RankExecutor:
    """`peers[r - 1]`: rank r of the mesh. `results`: what the peers found for a step."""

    def __init__(
        self,
        runner: ModelRunner,
        peers: Sequence[Peer] = (),
        shape: MeshShape = MeshShape(),
        results: Callable[[int], list[StepResult]] = _no_results,
    ) -> None:
        assert len(peers) == shape.size - 1, (len(peers), shape)
        self._runner = runner
        self._peers = peers
        self._shape = shape
        self._dp_ranks = [shape.coordinate("dp", rank) for rank in range(shape.size)]
        self._samples = [shape.is_sampling_rank(rank) for rank in range(shape.size)]
        self._results = results
        self._plans: dict[int, tuple[StepPlan, list[RankPart]]] = {}  # forwarded, not yet sampled
        self._failed: dict[int, FailedStep] = {}
        # By data-parallel rank and row: the last token, and what is drafted behind it.
        self._newest: dict[tuple[int, int], Int32s] = {}
        self._read: set[tuple[int, int]] = set()

    def forward(self, plan: StepPlan) -> None:
        if self._shape.pp > 1:
            plan = replace(plan, decode_tokens=self._fed(plan))
        parts = split_plan(plan, self._shape.dp, self._reads_states(plan))
        for peer, dp_rank in zip(self._peers, self._dp_ranks[1:], strict=True):
            peer.send(Forward(plan=parts[dp_rank].plan))
        self._plans[plan.step_id] = plan, parts
        try:
            self._runner.forward(parts[0].plan)
        except torch.OutOfMemoryError as error:
            self._failed[plan.step_id] = self._give_up(plan, error)

    def sample(self, step_id: int, late: LateInputs) -> DeviceStep | JoinedStep | FailedStep:
        plan, parts = self._plans.pop(step_id)
        if step_id in self._failed:
            return self._failed.pop(step_id)
        by_part = split_late(plan, parts, late) if len(parts) > 1 else [late]
        own, *others = (
            by_part[dp_rank] if samples else LateInputs()
            for dp_rank, samples in zip(self._dp_ranks, self._samples, strict=True)
        )
        for peer, theirs in zip(self._peers, others, strict=True):
            peer.send(SampleTokens(step_id=step_id, late=theirs))
        try:
            step = self._runner.sample(step_id, own)
        except torch.OutOfMemoryError as error:
            return self._give_up(plan, error)
        if not any(self._samples[1:]):
            return step
        return JoinedStep(
            plan, parts, step if self._samples[0] else None, self._results, self._remember
        )

    def _reads_states(self, plan: StepPlan) -> bool:
        """Whether hidden states of a prompt are asked for, for which its rank runs eagerly."""
        if self._shape.dp == 1:
            return False
        for join in plan.joins:
            place = join.dp_rank, join.row
            is_asked = join.sampling.prompt_logprobs is not None or join.pooling is not None
            (self._read.add if is_asked else self._read.discard)(place)
        chunks = slice(plan.num_decodes, None)
        places = zip(plan.dp_ranks[chunks].tolist(), plan.rows[chunks].tolist(), strict=True)
        return bool(self._read) and not self._read.isdisjoint(places)

    def _fed(self, plan: StepPlan) -> Int32s:
        """What the plan's decodes go on from: their last steps have committed."""
        decodes = slice(plan.num_decodes)
        places = zip(plan.dp_ranks[decodes].tolist(), plan.rows[decodes].tolist(), strict=True)
        newest = [self._newest[place] for place in places]
        width = max((len(ids) for ids in newest), default=1)
        fed = np.full((len(newest), width), -1, np.int32)
        for own, ids in zip(fed, newest, strict=True):
            own[: len(ids)] = ids
        return fed

    def _remember(self, plan: StepPlan, result: StepResult) -> None:
        if self._shape.pp == 1:
            return
        sampled = np.flatnonzero(result.num_accepted)
        newest = result.token_ids[sampled, result.num_accepted[sampled] - 1][:, None]
        if result.draft_ids is not None:
            newest = np.append(newest, result.draft_ids[sampled], axis=1)
        places = zip(plan.dp_ranks[sampled].tolist(), plan.rows[sampled].tolist(), strict=True)
        self._newest.update(zip(places, newest, strict=True))

    def _give_up(self, plan: StepPlan, error: torch.OutOfMemoryError) -> FailedStep:
        if self._peers:  # the other ranks are in the middle of the step: nothing can be saved
            raise error
        _log.error("step %d: %s", plan.step_id, error)
        torch.cuda.empty_cache()
        return FailedStep(
            plan, "out of device memory; lower max_num_tokens or free_gpu_memory_fraction"
        )
