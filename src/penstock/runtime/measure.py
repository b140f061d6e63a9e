"""Measures at start how long steps of decodes take, with and without drafts: `StepCosts`.

All ranks run these steps together, so they agree after each on the time that is left.
"""

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from penstock.config.run import RunConfig
from penstock.parallel.collectives import largest
from penstock.runtime.model_runner import ModelRunner
from penstock.runtime.profile_steps import decodes_of, first_tokens
from penstock.types.step import LateInputs, StepPlan
from penstock.types.step_costs import StepCosts

_DECODES = (1, 4, 16, 64, 256, 1024)
_REPEATS = 4  # turns; the first one warms up, of the others the quickest counts: one at least
_MOST_S = 1.5  # and what the fewest decodes take beyond it


def measure_costs(runner: ModelRunner, config: RunConfig) -> StepCosts | None:
    """None: steps have no room for drafts. The rows have no blocks: nobody reads their cache."""
    max_drafts, num_tokens = config.max_drafts, 1 + config.max_drafts
    max_kv_len = 1 + _REPEATS * (num_tokens + 5)  # a turn feeds so many tokens of a row
    if max_kv_len >= config.max_seq_len:
        return None
    fitting = min(config.max_batch_size, config.max_num_tokens // num_tokens)
    decodes: list[int] = []
    found: list[list[float]] = []
    started = time.monotonic()

    def most(numbers: Sequence[float]) -> list[float]:
        return largest(numbers, config.mesh.size, runner.device)

    def is_late() -> bool:
        return most([time.monotonic() - started])[0] > _MOST_S

    for num in sorted({min(num, fitting) for num in _DECODES} - {0}):
        if decodes and is_late():
            break
        rows = np.arange(num, dtype=np.int32)
        one, all_of_one = np.ones_like(rows), np.full_like(rows, num_tokens)
        one_of_one = np.append(one[1:], np.int32(min(2, num_tokens)))
        plans = [
            replace(decodes_of(rows, fed, drafted, max_kv_len), is_followed=is_followed)
            for fed, drafted, is_followed in (
                *((one, 0, False), (one, 0, True), (one, max_drafts, True)),
                *((one_of_one, max_drafts, True), (all_of_one, max_drafts, True)),
            )
        ]
        _run(runner, first_tokens(rows))
        # In turns, so that what else the machine does is the same for all of them.
        rounds: list[list[float]] = []
        while len(rounds) < 2 or (len(rounds) < _REPEATS and not is_late()):
            rounds.append([_run(runner, plan) for plan in plans])
        quickest = np.min(rounds[1:], axis=0)
        # Each does more than the one before; stages wait for the slowest of them.
        found.append(most(np.maximum.accumulate(quickest).tolist()))
        decodes.append(num)
    if not decodes:
        return None
    plain, keeping_up, drafting, single, full = zip(*found, strict=True)
    return StepCosts(
        max_drafts=max_drafts,
        decodes=tuple(decodes),
        plain=plain,
        keeping_up=keeping_up,
        drafting=drafting,
        single=single,
        full=full,
    )


def _run(runner: ModelRunner, plan: StepPlan) -> float:
    # Of a CPU others may have a share, which is none of the step's: it is given to this thread by
    # some milliseconds, as long as several steps take.
    clock = time.thread_time if runner.device.type == "cpu" else time.perf_counter
    started = clock()
    runner.forward(plan)
    runner.sample(plan.step_id, LateInputs()).wait()
    return clock() - started
