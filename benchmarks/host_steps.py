"""What the engine's host does in a step of decodes, with a schema and without.

    python benchmarks/host_steps.py --tokenizer FOLDER [--rows 1 32 256] [--steps 60]

The real loop, scheduler, cache and matchers, two steps in flight, on a device that takes no time:
it draws tokens that the mask allows. `--tokenizer` is a folder with a tokenizer.json. Requests have
the schema of 40 fields of `structured.py`. Milliseconds of a step in the CPU time of one thread,
which other programs do not lengthen: the mean without the highest 5 %, after `--warmup` steps.
`masks` are divided among threads where there are several, and made by one here.

chain: from the results of a step to the call that samples the next one, which holds `commit`
(`told`: matchers moved on, `known`: jump-forward), `plan` and `masks`. If it is longer than a
forward, the device waits.
send: the tokens as messages, encoded. total: chain, launch, send and figures.

What a GPU's runner does by itself (packing, launches, the copy of the masks) is not in it.
"""

import argparse
import itertools
import json
import random
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
from admission import run_config
from structured import schema

from penstock.config.run import CapacityPolicy
from penstock.config.schema import EngineConfig
from penstock.core.kv.groups import FullGroup
from penstock.core.kv.manager import KVManager
from penstock.core.loop import EngineLoop
from penstock.core.scheduler import Scheduler
from penstock.engine.grammars import Grammars
from penstock.engine.iteration import describe_step
from penstock.hub.folder import local_folder
from penstock.ipc import messages
from penstock.models.spec import parse_model_spec
from penstock.text.grammars.json_schema import schema_grammar
from penstock.text.grammars.library import make_vocabulary
from penstock.text.tokenizer import Tokenizer
from penstock.types.request import Grammar, Request
from penstock.types.sampling import SamplingParams
from penstock.types.stats import EngineCounters
from penstock.types.step import LateInputs, StepPlan, StepResult

_PHASES = ("chain", "commit", "told", "known", "plan", "masks", "send", "total")


class Clock:
    """Seconds of each phase in the step that runs."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.now = dict.fromkeys(_PHASES, 0.0)

    def timed(self, phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def run(*args: Any) -> Any:
            started = time.thread_time()
            try:
                return call(*args)
            finally:
                self.now[phase] += time.thread_time() - started

        return run

    def end(self) -> None:
        self.steps.append(self.now)
        self.now = dict.fromkeys(_PHASES, 0.0)


class Device:
    """Draws from the mask, in no time that counts."""

    def __init__(self, clock: Clock, ends: np.ndarray) -> None:
        self._clock, self._ends = clock, ends
        self._plan: StepPlan | None = None
        self._random = random.Random(0)
        self.committing = 0.0  # since when
        self.away = 0.0  # spent here
        self._results: deque[StepResult] = deque()

    def forward(self, plan: StepPlan) -> None:
        self._plan = plan

    def sample(self, step_id: int, late: LateInputs) -> "Device":
        started = time.thread_time()
        if self.committing:
            self._clock.now["chain"] = started - self.committing
        assert self._plan is not None and self._plan.step_id == step_id
        tokens_N = np.full((self._plan.num_entries, 1), 5, np.int32)
        firsts_N = np.cumsum(self._plan.num_logit_rows) - self._plan.num_logit_rows
        at = dict(zip(firsts_N.tolist(), range(self._plan.num_entries), strict=True))
        for position, mask_W in zip(late.positions.tolist(), late.bitmasks, strict=True):
            tokens_N[at[position]] = self._drawn(mask_W)
        result = StepResult(
            step_id=step_id,
            token_ids=tokens_N,
            num_accepted=np.minimum(self._plan.num_logit_rows, 1),
            logprobs={},
            prompt_logprobs={},
        )
        self._results.append(result)
        self.away += time.thread_time() - started
        return self

    def wait(self) -> StepResult:
        self.committing = time.thread_time()
        return self._results.popleft()

    def _drawn(self, mask_W: np.ndarray) -> int:
        bits = np.unpackbits(mask_W.view(np.uint8), bitorder="little")
        if self._random.random() < 0.4 and len(ending := self._ends[bits[self._ends] > 0]):
            return int(self._random.choice(ending))
        return int(self._random.choice(np.flatnonzero(bits)))


class Mail:
    """Takes requests once; encodes what would be sent."""

    def __init__(self, requests: list[Request]) -> None:
        self._message: messages.Message | None = messages.Submit(requests=tuple(requests))
        self.num_sent = 0

    def receive(self, timeout_ms: int) -> messages.Message | None:
        message, self._message = self._message, None
        return message

    def send(self, client_id: int, message: messages.Message) -> None:
        self.num_sent += len(messages.encode(message))

    def broadcast(self, message: messages.Message) -> None:
        self.num_sent += len(messages.encode(message))


def measure(held: Grammars, ends: np.ndarray, num: int, has_schema: bool, args: Any) -> Clock:
    clock, counters = Clock(), EngineCounters()
    config = replace(run_config(CapacityPolicy.MAX_UTILIZATION, 512, 8192), depth=2)
    kv = KVManager([FullGroup(60_000, config.tokens_per_block, False, False)])
    scheduler = Scheduler(config, [kv], counters)
    text = '{"grammars": [' + json.dumps(schema_grammar(json.dumps(schema(0)), "schema")) + "]}"
    requests = [
        Request(
            id=next(_IDS),
            prompt_ids=np.arange(64, dtype=np.int32),
            sampling=SamplingParams(),
            max_tokens=2000,
            late_inputs=has_schema,
            grammar=Grammar(text=text) if has_schema else None,
            stop_ids=(),
        )
        for _ in range(num)
    ]
    while not all([held.ready(one) for one in requests]):
        time.sleep(0.01)
    device, mail = Device(clock, ends), Mail(requests)
    for name, phase, owner in (
        ("plan", "plan", scheduler),
        ("commit", "commit", scheduler),
        ("send", "send", mail),
    ):
        setattr(owner, name, clock.timed(phase, getattr(owner, name)))
    told, known = held.on_commit, held.known_tokens
    held.on_commit = clock.timed("told", told)  # type: ignore[method-assign]
    held.known_tokens = clock.timed("known", known)  # type: ignore[method-assign]
    scheduler.add_gate(held)
    scheduler.add_follower(held)

    def describe(plan: StepPlan, result: StepResult, started: float) -> Any:
        return describe_step(plan, result, counters, config, 0.0, 0, 0)

    loop = EngineLoop(
        scheduler, device, mail, mail, counters, 2, time.monotonic, describe,
        clock.timed("masks", held.late_inputs),
    )  # fmt: skip
    while len(clock.steps) < args.warmup + args.steps and (scheduler.has_work or not clock.steps):
        before, device.away, started = counters.steps, 0.0, time.thread_time()
        while counters.steps == before:
            loop.turn()
        clock.now["total"] = time.thread_time() - started - device.away
        clock.end()
    for one in requests:
        held.on_close(one)
    held.on_commit, held.known_tokens = told, known  # type: ignore[method-assign]
    return clock


_IDS = itertools.count(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokenizer", type=Path, required=True, help="a folder")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warmup", type=int, default=10)
    args = parser.parse_args()
    tokenizer = Tokenizer.from_folder(args.tokenizer)
    held = Grammars(EngineConfig(model="tiny"), parse_model_spec(local_folder("tiny")))
    # Of this vocabulary, without the engine that would have it; and in one thread.
    held._num_words = -(-tokenizer.vocab_size // 32)
    held.__dict__["_executor"], held.__dict__["_num_threads"] = None, 1
    held.__dict__["_vocabulary"] = make_vocabulary(
        tokenizer, tokenizer.vocab_size, tokenizer.eos_ids
    )
    ends = np.array([tokenizer.encode(one, add_special_tokens=False)[0] for one in '",]}'])
    print(f"{'rows':>5} {'kind':<7}" + "".join(f"{phase:>9}" for phase in _PHASES))
    for num in args.rows:
        for has_schema in (False, True):
            steps = measure(held, ends, num, has_schema, args).steps[args.warmup :]
            figures = [
                statistics.fmean(
                    sorted(step[phase] * 1e3 for step in steps)[: -(len(steps) // 20) or None]
                )
                for phase in _PHASES
            ]
            kind = "schema" if has_schema else "plain"
            print(f"{num:>5} {kind:<7}" + "".join(f"{one:>9.3f}" for one in figures), flush=True)


if __name__ == "__main__":
    main()
