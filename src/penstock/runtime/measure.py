"""Measures at start how long steps of decodes take, with and without drafts: `StepCosts`.

All ranks run these steps together, so they agree after each on the time that is left.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from penstock.config.run import RunConfig
from penstock.parallel.collectives import largest
from penstock.runtime.model_runner import ModelRunner
from penstock.runtime.profile_steps import decodes_of, first_tokens
from penstock.types.step import LateInputs, StepPlan
from penstock.types.step_costs import StepCosts

_DECODES = (1, 4, 16, 64, 256, 1024)
_REPEATS = 4  # the first one warms up, of the others the quickest counts: one at least
_MOST_S = 1.5  # and what the fewest decodes take beyond it


def measure_costs(runner: ModelRunner, config: RunConfig) -> StepCosts | None:
    """None: steps have no room for drafts. The rows have no blocks: nobody reads their cache."""
    max_drafts, num_tokens = config.max_drafts, 1 + config.max_drafts
    if _REPEATS * num_tokens + 1 >= config.max_seq_len:
        return None
    fitting = min(config.max_batch_size, config.max_num_tokens // num_tokens)
    decodes: list[int] = []
    found: list[list[float]] = []
    started = time.monotonic()

    def most(numbers: Sequence[float]) -> list[float]:
        return largest(numbers, config.mesh.size, runner.device)

    def is_late() -> bool:
        return most([time.monotonic() - started])[0] > _MOST_S

    for num in _DECODES:
        if num > fitting or (decodes and is_late()):
            break
        rows = np.arange(num, dtype=np.int32)
        steps = ((1, 0, False), (1, 0, True), (1, max_drafts, True), (num_tokens, max_drafts, True))
        seconds: list[float] = []
        for fed, drafted, is_followed in steps:
            _run(runner, first_tokens(rows))
            plan = decodes_of(rows, fed, drafted, _REPEATS * num_tokens + 1)
            plan = replace(plan, is_followed=is_followed)
            quickest = _quickest(partial(_run, runner, plan), is_late)
            seconds.append(max([quickest, *seconds[-1:]]))  # each does more than the one before
        found.append(most(seconds))  # stages wait for the slowest of them
        decodes.append(num)
    if not decodes:
        return None
    plain, following, drafting, full = zip(*found, strict=True)
    return StepCosts(
        max_drafts=max_drafts,
        decodes=tuple(decodes),
        plain=plain,
        following=following,
        drafting=drafting,
        full=full,
    )


def _quickest(act: Callable[[], float], is_late: Callable[[], bool]) -> float:
    act()
    found = [act()]
    while len(found) < _REPEATS - 1 and not is_late():
        found.append(act())
    return min(found)


def _run(runner: ModelRunner, plan: StepPlan) -> float:
    started = time.perf_counter()
    runner.forward(plan)
    runner.sample(plan.step_id, LateInputs()).wait()
    return time.perf_counter() - started
