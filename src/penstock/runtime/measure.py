"""Measures at start how long steps of decodes take, with and without drafts: `StepCosts`."""

import time
from dataclasses import replace

import numpy as np

from penstock.config.run import RunConfig
from penstock.runtime.model_runner import ModelRunner
from penstock.runtime.profile_steps import decodes_of, first_tokens
from penstock.types.step import LateInputs, StepPlan
from penstock.types.step_costs import StepCosts

_DECODES = (1, 4, 16, 64, 256, 1024)
_REPEATS = 4  # the first one warms up, of the others the quickest counts
_MOST_S = 1.5  # on one rank; several measure all, in step


def measure_costs(runner: ModelRunner, config: RunConfig) -> StepCosts | None:
    """None: steps have no room for drafts. The rows have no blocks: nobody reads their cache."""
    most, num_tokens = config.max_drafts, 1 + config.max_drafts
    if _REPEATS * num_tokens + 1 >= config.max_seq_len:
        return None
    fitting = min(config.max_batch_size, config.max_num_tokens // num_tokens)
    decodes: list[int] = []
    found: list[list[float]] = []
    until = time.monotonic() + _MOST_S
    for num in _DECODES:
        is_late = config.mesh.size == 1 and time.monotonic() > until
        if num > fitting or (is_late and decodes):
            break
        rows = np.arange(num, dtype=np.int32)
        steps = ((1, 0, False), (1, 0, True), (1, most, True), (num_tokens, most, True))
        seconds: list[float] = []
        for fed, drafted, is_followed in steps:
            _run(runner, first_tokens(rows))
            plan = decodes_of(rows, fed, drafted, _REPEATS * num_tokens + 1)
            plan = replace(plan, is_followed=is_followed)
            quickest = min([_run(runner, plan) for _ in range(_REPEATS)][1:])
            seconds.append(max([quickest, *seconds[-1:]]))  # each does more than the one before
        found.append(seconds)
        decodes.append(num)
    if not decodes:
        return None
    plain, following, drafting, full = zip(*found, strict=True)
    return StepCosts(
        max_drafts=most,
        decodes=tuple(decodes),
        plain=plain,
        following=following,
        drafting=drafting,
        full=full,
    )


def _run(runner: ModelRunner, plan: StepPlan) -> float:
    started = time.perf_counter()
    runner.forward(plan)
    runner.sample(plan.step_id, LateInputs()).wait()
    return time.perf_counter() - started
