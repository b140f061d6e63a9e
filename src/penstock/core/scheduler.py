"""Chooses which sequences run next and which cache blocks they use: `plan()` down, `commit()` up.

Knows ids, lengths, rows and block numbers. Does not know text, tensors or devices. Several plans
may be in flight; a plan counts a token still on the device as one that will come, and a result
that comes for a sequence which has ended or was preempted meanwhile is dropped.
"""

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from penstock.config.run import QueuePolicy, RunConfig
from penstock.core.deltas import logprob_tuple
from penstock.core.gates import Gate
from penstock.core.kv.manager import KVManager
from penstock.core.policy import WaitingQueue, may_start
from penstock.core.sequence import Sequence, State
from penstock.core.stop import finish_reason
from penstock.types.outputs import TokenDelta, TokenLogprob
from penstock.types.request import FinishReason, Request
from penstock.types.stats import EngineCounters
from penstock.types.step import (
    FROM_DEVICE,
    BlockGrowth,
    CopyBlock,
    RowJoin,
    StepPlan,
    StepResult,
)


@dataclass(slots=True)
class _Entry:
    seq: Sequence
    life: int
    start: int
    num_tokens: int
    num_logit_rows: int
    max_kv_len: int


@dataclass(slots=True)
class _Draft:
    """A plan while it is being made."""

    step_id: int
    budgets: list[int]  # tokens left per rank
    decodes: list[_Entry] = field(default_factory=list)
    prefills: list[_Entry] = field(default_factory=list)
    joins: list[RowJoin] = field(default_factory=list)
    copies: list[CopyBlock] = field(default_factory=list)
    growth: list[tuple[int, int, int, int, int]] = field(default_factory=list)

    def has(self, seq: Sequence) -> bool:
        return seq.last_step == self.step_id


class Scheduler:
    """`kvs[r]`: cache of data-parallel rank r. A decode brings 1..`tokens_per_decode` tokens."""

    def __init__(
        self,
        config: RunConfig,
        kvs: Seq[KVManager],
        counters: EngineCounters,
        *,
        max_in_flight_per_sequence: int | None = None,
        tokens_per_decode: int = 1,
    ) -> None:
        self._config = config
        self._kvs = tuple(kvs)
        self._counters = counters
        self._max_in_flight = max_in_flight_per_sequence or config.depth
        self._tokens_per_decode = tokens_per_decode
        self._gates: list[Gate] = []
        self._waiting = WaitingQueue()
        self._running: list[Sequence] = []  # in order of importance
        self._by_id: dict[int, Sequence] = {}
        self._free_rows = [list(range(config.max_batch_size))[::-1] for _ in kvs]
        self._in_flight: deque[tuple[int, list[_Entry]]] = deque()
        self._next_step = 0
        self._committed_step = -1
        self._num_arrived = 0
        counters.total_blocks = sum(kv.num_usable for kv in kvs)

    # What comes in

    def add_gate(self, gate: Gate) -> None:
        self._gates.append(gate)

    def add(self, request: Request) -> None:
        by_priority = self._config.queue_policy is QueuePolicy.PRIORITY
        seq = Sequence(request, (-request.priority if by_priority else 0, self._num_arrived))
        self._num_arrived += 1
        self._by_id[request.id] = seq
        self._waiting.add(seq)

    def abort(self, request_id: int) -> TokenDelta | None:
        """End a request now, wherever it is. None when it has already ended."""
        seq = self._by_id.get(request_id)
        if seq is None:
            return None
        self._counters.aborted += 1
        return self._close(seq, FinishReason.ABORT)

    def fail_all(self, message: str) -> list[TokenDelta]:
        """End every open request; the device is gone."""
        return [self._fail(seq, message) for seq in list(self._by_id.values())]

    # What can be seen

    @property
    def has_work(self) -> bool:
        return bool(self._by_id)

    @property
    def num_open(self) -> int:
        return len(self._by_id)

    @property
    def running(self) -> tuple[Sequence, ...]:
        return tuple(self._running)

    def has_prefilled(self, request_id: int) -> bool:
        """Whether the request's prompt is in the cache, or will not be computed any more."""
        seq = self._by_id.get(request_id)
        return seq is None or seq.has_prefilled

    # Down: one plan

    def plan(self) -> StepPlan | None:
        """The next step, or None when nothing can run before a step in flight has committed."""
        draft = _Draft(self._next_step, [self._config.max_num_tokens] * len(self._kvs))
        self._plan_decodes(draft)
        self._plan_chunks(draft)
        self._admit(draft)
        entries = draft.decodes + draft.prefills
        if not entries:
            return None
        self._next_step += 1
        for entry in entries:
            entry.seq.num_in_flight += 1
            if entry.num_logit_rows:
                entry.seq.num_pending += 1
        self._in_flight.append((draft.step_id, entries))
        self._gauge()
        return self._to_plan(draft, entries)

    def _plan_decodes(self, draft: _Draft) -> None:
        is_blocked = [False] * len(self._kvs)  # an older sequence waits for blocks on this rank
        num_tokens = self._tokens_per_decode
        for seq in list(self._running):
            if seq.state is not State.RUNNING or seq.is_prefilling or not seq.wants_tokens:
                continue
            if seq.num_in_flight >= self._max_in_flight or draft.budgets[seq.rank] < num_tokens:
                continue
            max_kv_len = seq.num_tokens + (seq.num_pending + 1) * num_tokens - 1
            if not self._make_room(draft, seq, max_kv_len, is_blocked):
                continue
            self._add_entry(
                draft.decodes, draft, seq, FROM_DEVICE, num_tokens, num_tokens, max_kv_len
            )

    def _make_room(
        self, draft: _Draft, seq: Sequence, max_kv_len: int, is_blocked: list[bool]
    ) -> bool:
        """Blocks for `seq` up to `max_kv_len`, if need be taken from less important sequences."""
        kv = self._kvs[seq.rank]
        assert seq.holder is not None
        if not kv.needs_blocks(seq.holder, max_kv_len):
            return True
        if is_blocked[seq.rank]:
            return False
        while kv.shortfall(seq.holder, max_kv_len) > 0:
            victim = self._victim(draft, seq.rank)
            self._preempt(victim)
            if victim is seq:
                return False
        if kv.grow(seq.holder, max_kv_len):
            return True
        # The blocks exist but a step in flight may still write them. Nobody younger takes them.
        is_blocked[seq.rank] = True
        return False

    def _victim(self, draft: _Draft, rank: int) -> Sequence:
        return next(s for s in reversed(self._running) if s.rank == rank and not draft.has(s))

    def _preempt(self, seq: Sequence) -> None:
        self._counters.preemptions += 1
        self._give_back(seq)
        seq.preempt()
        self._waiting.add(seq)

    def _plan_chunks(self, draft: _Draft) -> None:
        for seq in self._running:
            if seq.is_prefilling and seq.num_in_flight < self._max_in_flight:
                self._plan_chunk(draft, seq)

    def _chunk_size(self, draft: _Draft, rank: int, start: int, num_left: int) -> int:
        """How many of `num_left` tokens to prefill from `start` in this step; 0: not now."""
        num_tokens = self._kvs[rank].chunk_limit(start, min(num_left, draft.budgets[rank]))
        # A text that grew beyond the budget before it was preempted comes back in chunks anyway.
        must_be_whole = not self._config.chunked_prefill and num_left <= self._config.max_num_tokens
        return 0 if must_be_whole and num_tokens < num_left else num_tokens

    def _plan_chunk(self, draft: _Draft, seq: Sequence) -> None:
        start = seq.num_planned
        num_tokens = self._chunk_size(draft, seq.rank, start, seq.num_prefill - start)
        if not num_tokens:
            return
        seq.num_planned += num_tokens
        self._counters.prefill_chunks += 1
        self._add_entry(
            draft.prefills,
            draft,
            seq,
            start,
            num_tokens,
            0 if seq.is_prefilling else 1,
            seq.num_planned,
        )

    def _admit(self, draft: _Draft) -> None:
        for seq in self._waiting:
            ranks = [r for r, rows in enumerate(self._free_rows) if rows and draft.budgets[r] > 0]
            if not ranks:
                return
            if not all(gate.ready(seq.request) for gate in self._gates):
                continue
            emptiest = max(ranks, key=lambda r: len(self._free_rows[r]))
            if not self._start(draft, seq, emptiest):
                return  # first come first served: nobody overtakes a request that waits for room
            self._plan_chunk(draft, seq)

    def _start(self, draft: _Draft, seq: Sequence, rank: int) -> bool:
        kv = self._kvs[rank]
        # Prompt log-probabilities need every position computed; otherwise one token must be left.
        needs_all = seq.request.sampling.prompt_logprobs is not None and not seq.has_prefilled
        match = kv.match(seq.request.cache_keys, seq.tokens, 0 if needs_all else seq.num_tokens - 1)
        if not self._chunk_size(draft, rank, match.num_tokens, seq.num_tokens - match.num_tokens):
            return False
        peers = [s for s in self._running if s.rank == rank]
        overshoot = self._tokens_per_decode * self._max_in_flight
        if not may_start(self._config.capacity_policy, kv, seq, match, peers, overshoot):
            return False
        holder, copies = kv.open(match, seq.num_tokens)
        self._waiting.remove(seq)
        seq.start(rank, self._free_rows[rank].pop(), holder, match.num_tokens)
        self._running.append(seq)
        self._running.sort(key=lambda s: s.sort_key)
        if seq.life == 0:
            seq.num_cached = match.num_tokens
            self._counters.prefix_query_tokens += seq.num_tokens
            self._counters.prefix_hit_tokens += match.num_tokens
        draft.copies += [CopyBlock(rank=rank, group=c.group, src=c.src, dst=c.dst) for c in copies]
        draft.joins.append(
            RowJoin(
                request_id=seq.id,
                rank=rank,
                row=seq.row,
                token_ids=seq.tokens.copy(),
                num_cached=match.num_tokens,
                num_prompt=seq.num_prompt,
                sampling=seq.request.sampling,
                stop_ids=seq.request.stop_ids,
            )
        )
        self._send_growth(draft, seq)
        return True

    def _add_entry(
        self,
        to: list[_Entry],
        draft: _Draft,
        seq: Sequence,
        start: int,
        num_tokens: int,
        num_logit_rows: int,
        max_kv_len: int,
    ) -> None:
        seq.last_step = draft.step_id
        draft.budgets[seq.rank] -= num_tokens
        to.append(_Entry(seq, seq.life, start, num_tokens, num_logit_rows, max_kv_len))
        self._send_growth(draft, seq)

    def _send_growth(self, draft: _Draft, seq: Sequence) -> None:
        assert seq.holder is not None
        draft.growth += [
            (seq.rank, new.group, seq.row, new.index, new.block) for new in seq.holder.unsent()
        ]

    def _to_plan(self, draft: _Draft, entries: list[_Entry]) -> StepPlan:
        growth = np.array(draft.growth, np.int32).reshape(-1, 5).T
        num_used = [self._config.max_num_tokens - budget for budget in draft.budgets]
        return StepPlan(
            step_id=draft.step_id,
            joins=tuple(draft.joins),
            growth=BlockGrowth(
                ranks=growth[0],
                groups=growth[1],
                rows=growth[2],
                indices=growth[3],
                block_ids=growth[4],
            ),
            cache_ops=tuple(draft.copies),
            ranks=_int32s(e.seq.rank for e in entries),
            rows=_int32s(e.seq.row for e in entries),
            starts=_int32s(e.start for e in entries),
            num_tokens=_int32s(e.num_tokens for e in entries),
            num_logit_rows=_int32s(e.num_logit_rows for e in entries),
            max_kv_lens=_int32s(e.max_kv_len for e in entries),
            num_decodes=len(draft.decodes),
            padded_tokens=max(num_used),
            needs_late_inputs=any(e.seq.request.late_inputs for e in entries),
        )

    # Up: one result

    def commit(self, result: StepResult) -> list[TokenDelta]:
        """Take over what a step found; results arrive in the order of the plans."""
        step_id, entries = self._in_flight.popleft()
        assert result.step_id == step_id, (result.step_id, step_id)
        deltas: list[TokenDelta] = []
        for i, entry in enumerate(entries):
            seq = entry.seq
            if seq.state is not State.RUNNING or seq.life != entry.life:
                continue
            if result.error is not None:
                deltas.append(self._fail(seq, result.error))
            else:
                deltas += self._commit_entry(entry, i, result)
        self._committed_step = step_id
        for kv in self._kvs:
            kv.release(step_id)
        self._counters.steps += 1
        self._gauge()
        return deltas

    def _commit_entry(self, entry: _Entry, i: int, result: StepResult) -> list[TokenDelta]:
        seq = entry.seq
        seq.num_in_flight -= 1
        if entry.start != FROM_DEVICE:
            self._counters.prompt_tokens += entry.num_tokens
        prompt_logprobs = logprob_tuple(result.prompt_logprobs.get(i))
        # A preempted sequence computes positions again that were already reported.
        prompt_logprobs = prompt_logprobs[max(0, seq.num_prompt_logprobs - entry.start) :]
        seq.num_prompt_logprobs += len(prompt_logprobs)
        if not entry.num_logit_rows:
            self._index(seq, entry.start + entry.num_tokens)
            if not prompt_logprobs:
                return []
            return [TokenDelta(request_id=seq.id, prompt_logprobs=prompt_logprobs)]
        seq.num_pending -= 1
        reason, num_before = None, seq.num_output
        for token_id in result.token_ids[i, : result.num_accepted[i]].tolist():
            seq.append(token_id)
            if reason := finish_reason(seq, token_id):
                break
        num_new = seq.num_output - num_before
        seq.unreported_logprobs += logprob_tuple(result.logprobs.get(i))[:num_new]
        self._counters.generated_tokens += num_new
        seq.has_prefilled = True
        self._index(seq, seq.num_tokens - 1)
        if reason is None and not seq.is_report_due and not prompt_logprobs:
            return []
        delta = self._report(seq, prompt_logprobs, reason)
        if reason is not None:
            self._counters.finished += 1
            self._close(seq, reason)
        return [delta]

    def _report(
        self,
        seq: Sequence,
        prompt_logprobs: tuple[TokenLogprob, ...],
        reason: FinishReason | None,
    ) -> TokenDelta:
        """All output that has not been reported yet."""
        new_ids = tuple(seq.tokens[seq.num_prompt + seq.num_reported :].tolist())
        is_first = seq.num_reported == 0
        delta = TokenDelta(
            request_id=seq.id,
            token_ids=new_ids,
            logprobs=tuple(seq.unreported_logprobs),
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=min(seq.num_cached, seq.num_prompt) if is_first else 0,
            finish=reason,
            stop_id=new_ids[-1] if reason is FinishReason.STOP else None,
        )
        seq.num_reported = seq.num_output
        seq.unreported_logprobs.clear()
        return delta

    def _index(self, seq: Sequence, num_computed: int) -> None:
        assert seq.holder is not None
        self._kvs[seq.rank].index(seq.holder, seq.tokens, num_computed)

    # How a request ends

    def _fail(self, seq: Sequence, message: str) -> TokenDelta:
        self._counters.failed += 1
        self._close(seq, FinishReason.ERROR)
        return TokenDelta(request_id=seq.id, finish=FinishReason.ERROR, error=message)

    def _close(self, seq: Sequence, reason: FinishReason) -> TokenDelta:
        if seq.state is State.WAITING:
            self._waiting.remove(seq)
        else:
            self._give_back(seq)
        seq.finish()
        del self._by_id[seq.id]
        self._gauge()
        return TokenDelta(request_id=seq.id, finish=reason)

    def _give_back(self, seq: Sequence) -> None:
        """Row and blocks of a running sequence. Steps run in order: the row is free at once."""
        assert seq.holder is not None
        self._kvs[seq.rank].close(seq.holder, seq.last_step)
        self._kvs[seq.rank].release(self._committed_step)
        self._free_rows[seq.rank].append(seq.row)
        self._running.remove(seq)

    def _gauge(self) -> None:
        counters = self._counters
        counters.running = len(self._running)
        counters.waiting = len(self._waiting)
        counters.used_blocks = sum(kv.num_held for kv in self._kvs)
        counters.cached_blocks = sum(kv.num_reusable for kv in self._kvs)


def _int32s(values: Iterable[int]) -> np.ndarray:
    return np.fromiter(values, np.int32)
