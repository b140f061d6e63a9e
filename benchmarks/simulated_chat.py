"""Conversations on a device that only takes time: what rules of the scheduler do to streams.

The real scheduler plans, with two steps in flight and prefix reuse; a step takes what steps of
Llama-3.1-8B in BF16 took on an H200, padded to the graph that would run it. `python
benchmarks/admission.py --conversations` prints it. On 2026-11-18 400 conversations with all of
max_num_tokens in bursts gave 8,112 tok/s and TPOT p99 87 ms on the GPU; with the graphs that were
captured at start then, 8,011 and 78 here.
"""

import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate

import numpy as np

from penstock.bench.conversations import Turn, Workload
from penstock.config.graphs import CudaGraphConfig, padded_sizes
from penstock.config.run import RunConfig
from penstock.core.kv.groups import FullGroup
from penstock.core.kv.manager import KVManager
from penstock.core.plan_builder import Entry
from penstock.core.scheduler import Scheduler
from penstock.runtime.step_layout import MAX_CHUNKS
from penstock.types.request import Request
from penstock.types.sampling import SamplingParams
from penstock.types.stats import EngineCounters
from penstock.types.step import FROM_DEVICE, StepResult

# Milliseconds of a step but for its attention, by its tokens: docs/notes/2026-11-mixed-steps.md,
# 2026-11-decode-profile.md; 164 ms for 8192 tokens.
_TOKENS = (1, 8, 32, 72, 96, 128, 256, 288, 400, 512, 640, 768, 1024, 2048, 8192)
_MS = (3.7, 3.95, 4.3, 5.3, 5.6, 5.9, 7.5, 8.7, 11.0, 13.0, 15.5, 18.0, 22.5, 42.0, 164.0)
_KEY_BYTES, _BYTES_MS = 131072, 4.0e9  # of a cached token, all layers; read by decodes
_ATTENTION_FLOPS = 4 * 4096 * 32  # of a prompt's token and a key
_FLOPS_MS = 450e9
_EAGER_MS, _GRAPH_MS, _COMMIT_MS = 20.0, 1.0, 0.2  # of the host
_CLIENT_MS = 2.0  # until the next turn is there
_ARRIVAL_MS = 150.0  # until all conversations that begin at once are there
_NUM_TOKENS = 896928  # that the cache holds


@dataclass(slots=True)
class _Conversation:
    turns: list[Turn]
    drawn: random.Random
    ids: list[int]
    num_asked: int = 0
    asked_ms: float = 0.0
    token_ms: list[float] = field(default_factory=list)  # of the turn that runs


@dataclass(slots=True)
class ChatFigures:
    seconds: float
    num_out: int
    first_ttft_ms: list[float] = field(default_factory=list)
    later_ttft_ms: list[float] = field(default_factory=list)
    tpot_ms: list[float] = field(default_factory=list)
    itl_ms: list[float] = field(default_factory=list)
    num_cached: int = 0
    num_eager: int = 0

    @property
    def tok_s(self) -> float:
        return self.num_out / self.seconds


class Padding(StrEnum):
    """What mixed steps are padded to: a captured shape, nothing, or the next of `_TOTALS`, whatever
    part of it decodes. The engine does the first; the others say what it costs."""

    CAPTURED = "captured"
    NONE = "none"
    TOTAL = "total"


_TOTALS = (*range(16, 257, 16), *range(288, 1025, 32))


class Device:
    """How long a step takes. `mixes`: of decodes and prompt tokens, for which it has graphs."""

    def __init__(
        self, mixes: Sequence[tuple[int, int]], padding: Padding = Padding.CAPTURED
    ) -> None:
        self._mixes = sorted(mixes, key=lambda mix: (sum(mix), mix))
        self._padding, config = padding, CudaGraphConfig()
        self._decodes, self._prompts = padded_sizes(512), config.token_sizes(8192)

    def step(self, entries: Sequence[Entry]) -> tuple[float, bool]:
        """(milliseconds, whether it runs eagerly)."""
        decodes = [entry for entry in entries if entry.start == FROM_DEVICE]
        chunks = [entry for entry in entries if entry.start != FROM_DEVICE]
        num_tokens = sum(entry.num_tokens for entry in chunks)
        padded = self._padded(len(decodes), num_tokens, len(chunks))
        size = padded or len(decodes) + num_tokens
        keys = sum(entry.seq.num_tokens for entry in decodes)
        pairs = sum(entry.num_tokens * (entry.start + entry.num_tokens / 2) for entry in chunks)
        attention = keys * _KEY_BYTES / _BYTES_MS + pairs * _ATTENTION_FLOPS / _FLOPS_MS
        return float(np.interp(size, _TOKENS, _MS)) + attention, padded is None

    def _padded(self, num_decodes: int, num_tokens: int, num_chunks: int) -> int | None:
        if num_chunks > MAX_CHUNKS:
            return None
        if num_decodes and num_tokens:
            fits = (
                sum(mix) for mix in self._mixes if num_decodes <= mix[0] and num_tokens <= mix[1]
            )
            found = next(fits, None)
            if found is None or self._padding is Padding.CAPTURED:
                return found
            num_all = num_decodes + num_tokens
            sizes = [num_all] if self._padding is Padding.NONE else _TOTALS
            return next(size for size in sizes if size >= num_all)
        sizes = self._decodes if num_decodes else self._prompts
        return next((size for size in sizes if size >= num_decodes + num_tokens), None)


def simulate_chat(
    config: RunConfig,
    limit: Callable[[int, int], int],
    workload: Workload,
    num_conversations: int,
    device: Device,
    rate: float | None = None,
) -> ChatFigures:
    """`limit`: as `Scheduler` takes it. `rate`: conversations a second that begin, at random; None:
    all at once."""
    size, counters = config.tokens_per_block, EngineCounters()
    group = FullGroup(_NUM_TOKENS // size + 1, size, config.block_reuse, config.partial_reuse)
    scheduler = Scheduler(config, [KVManager([group], [0])], counters, chunk_limit=limit)
    system = [random.Random(0).randrange(10_000) for _ in range(workload.system_tokens)]
    talks = [
        _Conversation(workload.conversation(number), random.Random(number), system.copy())
        for number in range(num_conversations)
    ]
    pauses_ms = [_ARRIVAL_MS / len(talks)] * len(talks)
    if rate is not None:
        drawn = random.Random(f"{workload.seed}/arrivals")
        pauses_ms = [1e3 * drawn.expovariate(rate) for _ in talks]
    due = [(at_ms, number) for number, at_ms in enumerate(accumulate(pauses_ms))]
    figures, in_flight = ChatFigures(0.0, 0), deque[tuple[int, list[Entry], float]]()
    now = device_ms = 0.0
    while due or in_flight or scheduler.has_work:
        while due and due[0][0] <= now:
            asked_ms, number = heapq.heappop(due)
            _ask(scheduler, number, talks[number], asked_ms)
        plan = scheduler.plan() if len(in_flight) < config.depth else None
        if plan is not None:
            _, entries = scheduler._in_flight[-1]
            step_ms, is_eager = device.step(entries)
            figures.num_eager += is_eager
            now += _EAGER_MS if is_eager else _GRAPH_MS
            device_ms = max(device_ms, now) + step_ms
            in_flight.append((plan.step_id, entries, device_ms))
        elif in_flight:
            step_id, entries, end_ms = in_flight.popleft()
            now = max(now, end_ms) + _COMMIT_MS
            for number in _commit(scheduler, talks, step_id, entries, now):
                talk = talks[number]
                _count(figures, talk)
                if talk.num_asked < len(talk.turns):
                    heapq.heappush(due, (now + _CLIENT_MS, number))
        else:
            now = due[0][0]
    figures.seconds, figures.num_cached = now / 1e3, counters.prefix_hit_tokens
    return figures


def _ask(scheduler: Scheduler, number: int, talk: _Conversation, asked_ms: float) -> None:
    turn = talk.turns[talk.num_asked]
    talk.ids += [talk.drawn.randrange(10_000) for _ in range(turn.num_user)]
    talk.num_asked, talk.asked_ms, talk.token_ms = talk.num_asked + 1, asked_ms, []
    scheduler.add(
        Request(
            id=number, prompt_ids=np.array(talk.ids, np.int32), sampling=SamplingParams(),
            max_tokens=turn.num_answer,
        )
    )  # fmt: skip


def _commit(
    scheduler: Scheduler,
    talks: Sequence[_Conversation],
    step_id: int,
    entries: Sequence[Entry],
    now: float,
) -> list[int]:
    """The conversations whose turn has ended."""
    ids = [[talks[entry.seq.id].drawn.randrange(10_000)] for entry in entries]
    numbers = [bool(entry.num_logit_rows) for entry in entries]
    result = StepResult(
        step_id=step_id, token_ids=np.array(ids, np.int32),
        num_accepted=np.array(numbers, np.int32), logprobs={}, prompt_logprobs={},
    )  # fmt: skip
    ended = []
    for delta in scheduler.commit(result):
        talk = talks[delta.request_id]
        talk.ids += delta.token_ids
        talk.token_ms += [now] * len(delta.token_ids)
        if delta.finish is not None:
            ended.append(delta.request_id)
    return ended


def _count(figures: ChatFigures, talk: _Conversation) -> None:
    """A turn that has ended."""
    times = talk.token_ms
    figures.num_out += len(times)
    ttft_ms = figures.first_ttft_ms if talk.num_asked == 1 else figures.later_ttft_ms
    ttft_ms.append(times[0] - talk.asked_ms)
    if len(times) > 1:
        figures.tpot_ms.append((times[-1] - times[0]) / (len(times) - 1))
    figures.itl_ms += np.diff(times).tolist()
