"""`RankExecutor`: runs plans on this rank and sends them to the others, in the same order."""

from collections.abc import Sequence

import numpy as np
import torch

from penstock import log
from penstock.ipc.channel import Sender
from penstock.ipc.messages import Forward, Sample
from penstock.runtime.model_runner import DeviceStep, ModelRunner
from penstock.types.step import LateInputs, StepPlan, StepResult

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


class RankExecutor:
    def __init__(self, runner: ModelRunner, peers: Sequence[Sender] = ()) -> None:
        self._runner = runner
        self._peers = peers
        self._plans: dict[int, StepPlan] = {}  # forwarded, not yet sampled
        self._failed: dict[int, FailedStep] = {}

    def forward(self, plan: StepPlan) -> None:
        for peer in self._peers:
            peer.send(Forward(plan=plan))
        self._plans[plan.step_id] = plan
        try:
            self._runner.forward(plan)
        except torch.OutOfMemoryError as error:
            self._failed[plan.step_id] = self._give_up(plan, error)

    def sample(self, step_id: int, late: LateInputs) -> DeviceStep | FailedStep:
        plan = self._plans.pop(step_id)
        if step_id in self._failed:
            return self._failed.pop(step_id)
        for peer in self._peers:  # none of them chooses tokens (SAMPLING_RANK is this one)
            peer.send(Sample(step_id=step_id, late=LateInputs()))
        try:
            return self._runner.sample(step_id, late)
        except torch.OutOfMemoryError as error:
            return self._give_up(plan, error)

    def _give_up(self, plan: StepPlan, error: torch.OutOfMemoryError) -> FailedStep:
        if self._peers:  # the other ranks are in the middle of the step: nothing can be saved
            raise error
        _log.error("step %d: %s", plan.step_id, error)
        torch.cuda.empty_cache()
        return FailedStep(
            plan, "out of device memory; lower max_num_tokens or free_gpu_memory_fraction"
        )
