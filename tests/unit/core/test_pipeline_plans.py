"""Micro-batches fill the stages of a pipeline. On a device that only takes time, a virtual one."""

import itertools

import numpy as np
import pytest
from core_engine import Engine, run_config
from fake_executor import FakeExecutor

from penstock.types.mesh import MeshShape
from penstock.types.step import StepPlan, StepResult


class TimedStages(FakeExecutor):
    """Each stage takes one unit for a step, after the stage before it and its own last step."""

    def __init__(self, num_stages: int, *args) -> None:
        super().__init__(*args)
        self.now, self.free_at = 0.0, [0.0] * num_stages
        self.done_at: list[float] = []

    def forward(self, plan: StepPlan) -> None:
        super().forward(plan)
        at = self.now
        for stage, free_at in enumerate(self.free_at):
            at = self.free_at[stage] = max(at, free_at) + 1.0
        self.done_at.append(at)

    def sample(self, step_id, late):
        handle, done_at = super().sample(step_id, late), self.free_at[-1]
        wait = handle.wait

        def timed() -> StepResult:
            self.now = max(self.now, done_at)
            return wait()

        handle.wait = timed
        return handle


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_no_stage_waits_while_there_is_load(num_stages):
    engine = Engine(
        num_blocks=400, max_batch_size=32, max_num_tokens=64, depth=num_stages,
        mesh=MeshShape(pp=num_stages),
    )  # fmt: skip
    device = TimedStages(num_stages, 1, 4)
    engine.device = engine.loop._executor = device
    for i in range(32):
        engine.submit([i, 7, 9], max_tokens=50)
    engine.run_dry()
    engine.assert_empty()
    # While all run. One step a unit is all that stages can do.
    first, last = 8 * num_stages, 40 * num_stages
    took = device.done_at[last] - device.done_at[first]
    assert (last - first) / took >= 0.95
    num_tokens = sum(plan.num_entries for plan in device.plans[first:last])
    assert num_tokens / took >= 0.95 * 32 / num_stages


def test_the_chunks_of_a_prompt_follow_each_other_through_the_stages():
    config = run_config()
    engine = Engine(num_blocks=40, depth=4, mesh=MeshShape(pp=4))
    device = TimedStages(4, 1, config.tokens_per_block)
    engine.device = engine.loop._executor = device
    engine.submit(range(1, 41), max_tokens=2)  # five chunks of eight, then a decode
    engine.run_dry()
    starts = list(itertools.chain(*(plan.starts.tolist() for plan in device.plans)))
    assert np.array_equal(starts, [0, 8, 16, 24, 32, -1])
    assert device.now == 4 + 4 + 4  # the fifth ends four units after the first, the decode four on
