"""Chooses which sequences run next and which cache blocks they use: `plan()` down, `commit()` up.

Knows ids, lengths, rows and block numbers. Does not know text, tensors or devices. Several plans
may be in flight; a plan counts a token still on the device as one that will come, and a result
that comes for a sequence which has ended or was preempted meanwhile is dropped.
"""

import math
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import takewhile

from penstock.config.run import QueuePolicy, RunConfig
from penstock.core.deltas import logprob_tuple, new_prompt_logprobs, report
from penstock.core.drafts import DraftsPerDecode, Lengths
from penstock.core.followers import Follower, LateEntry
from penstock.core.gates import Gate
from penstock.core.kv.manager import KVManager
from penstock.core.placement import Placement
from penstock.core.plan_builder import Entry, PlanBuilder
from penstock.core.policy import OutputLengths, makes_way, may_start, most_tokens, victim
from penstock.core.queue import WaitingQueue
from penstock.core.sequence import Sequence, State
from penstock.core.stop import finish_reason
from penstock.errors import RequestError
from penstock.types.outputs import TokenDelta, TokenLogprob
from penstock.types.request import FinishReason, Request, client_of
from penstock.types.stats import EngineCounters
from penstock.types.step import FROM_DEVICE, StepPlan, StepResult

# Tokens that need not be drawn: how long a chunk of them is at least, and what it costs the decodes
# of its step, as a share of their time. Longer ones than the most are too rare to be looked for.
_MIN_KNOWN, _MAX_KNOWN, _CHUNK_COST = 3, 24, 0.4


class Scheduler:
    """`kvs[r]`: cache of data-parallel rank r."""

    def __init__(
        self,
        config: RunConfig,
        kvs: Seq[KVManager],
        counters: EngineCounters,
        *,
        max_in_flight_per_sequence: int | None = None,
        chunk_limit: Callable[[int, int], int] | None = None,
        drafts_per_decode: Callable[[Seq[Sequence]], Lengths] | None = None,
        micro_batch: Callable[[list[Sequence], Seq[Sequence]], list[Sequence]] | None = None,
    ) -> None:
        """`max_in_flight_per_sequence`: of decodes. `chunk_limit`: the most prompt tokens of a step
        that also decodes, by the sequences that wait for a first token and could have it, and by
        those that decode. `drafts_per_decode`: the most drafts of each decode. `micro_batch`: which
        of the sequences that could decode do, by those and all that run; None: all of them."""
        self._config = config
        self._kvs = tuple(kvs)
        self._placement = Placement(self._kvs, config.balance)
        self._counters = counters
        self._max_in_flight = max_in_flight_per_sequence or config.depth
        self._chunk_limit = chunk_limit or (lambda num_new, num_decodes: config.max_num_tokens)
        self._drafts_per_decode = (
            drafts_per_decode
            or DraftsPerDecode(
                config.max_drafts, math.inf, None, config.max_batch_size, len(kvs)
            ).of
        )
        self._micro_batch = micro_batch or (lambda ready, running: ready)
        self._gates: list[Gate] = []
        self._followers: list[Follower] = []
        self._refused: list[TokenDelta] = []  # by gates, until they are taken
        self._waiting = WaitingQueue()
        self._lengths = OutputLengths()
        self._running: list[Sequence] = []  # in order of importance
        self._by_id: dict[int, Sequence] = {}
        self._free_rows = [list(range(config.max_batch_size))[::-1] for _ in kvs]
        self._in_flight: deque[tuple[int, list[Entry]]] = deque()
        self._next_step = 0
        self._held_up: tuple[Sequence, bool] | None = (
            None  # in the last plan; whether it lacks a row or blocks
        )
        self._num_arrived = 0
        counters.total_blocks = sum(kv.num_usable for kv in kvs)

    # What comes in

    def add_gate(self, gate: Gate) -> None:
        self._gates.append(gate)

    def add_follower(self, follower: Follower) -> None:
        self._followers.append(follower)

    def add(self, request: Request) -> TokenDelta | None:
        """Take a request; one that no cache here could ever hold ends at once."""
        by_priority = self._config.queue_policy is QueuePolicy.PRIORITY
        seq = Sequence(request, (-request.priority if by_priority else 0, self._num_arrived))
        self._num_arrived += 1
        self._by_id[request.id] = seq
        self._waiting.add(seq)
        num_tokens = most_tokens(seq)
        if not any(kv.could_hold([num_tokens]) for kv in self._kvs):
            return self._fail(seq, f"{num_tokens} tokens do not fit into the cache")
        return None

    def abort(self, request_id: int) -> TokenDelta | None:
        """End a request now, wherever it is. None when it has already ended."""
        seq = self._by_id.get(request_id)
        if seq is None:
            return None
        self._counters.aborted += 1
        return self._close(seq, FinishReason.ABORT)

    def abort_client(self, client_id: int) -> list[TokenDelta | None]:
        """End every request of an API server that is gone."""
        return [self.abort(one) for one in list(self._by_id) if client_of(one) == client_id]

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
        budgets = [self._config.max_num_tokens] * len(self._kvs)
        builder = PlanBuilder(self._next_step, budgets)
        self._preempt_leaving(builder)
        is_due = self._preempt_for_tenant(builder)
        lengths = self._plan_decodes(builder)
        self._plan_extended(builder)
        builder.limit_chunks(self._most_beside_decodes())
        num_free_rows = list(map(len, self._free_rows))
        may_begin = self._placement.may_begin(len(self._waiting), num_free_rows, self._running)
        if is_due and may_begin:
            self._admit(builder)  # before prompts under way take all of the budget once more
        self._plan_chunks(builder)
        if may_begin:
            self._admit(builder)
        entries = builder.entries
        if not entries:
            return None
        self._next_step += 1
        self._in_flight.append((builder.step_id, entries))
        self._gauge()
        return builder.to_plan([op for kv in self._kvs for op in kv.take_ops()], lengths)

    def take_refused(self) -> list[TokenDelta]:
        """The last deltas of requests that a gate has ended since the last call."""
        refused, self._refused = self._refused, []
        return refused

    def _preempt_for_tenant(self, builder: PlanBuilder) -> bool:
        """Whether somebody was next in the last plan and nothing of its tenant runs."""
        held_up, self._held_up = self._held_up, None
        if held_up is None:
            return False
        seq, lacks_room = held_up
        if seq.state is not State.WAITING or seq.account.num_running:
            return False
        leaving = makes_way(self._config.capacity_policy, self._running) if lacks_room else None
        if leaving is not None:
            self._preempt(builder, leaving)
        return True

    def _plan_decodes(self, builder: PlanBuilder) -> Lengths:
        ready = [seq for seq in self._running if self._may_decode(seq)]
        ready = self._micro_batch(ready, self._running)
        spare = builder.budgets.copy()  # for drafts: what every decode's own token leaves
        for seq in ready:
            spare[seq.dp_rank] -= 1
        lengths = self._drafts_per_decode(ready)
        for seq, most in zip(ready, lengths.each, strict=True):  # but for those who leave meanwhile
            if seq.state is not State.RUNNING or not self._may_decode(seq):
                continue
            if not builder.budgets[seq.dp_rank]:
                continue
            num_drafts = self._num_drafts(seq, min(most, spare[seq.dp_rank]))
            max_kv_len = seq.num_tokens + seq.num_pending + num_drafts
            if self._reserve_blocks(builder, seq, max_kv_len):
                if seq.num_tokens + seq.num_pending - 1 == seq.num_prefill:  # the first one
                    self._before_step(builder, seq, seq.num_prefill)
                spare[seq.dp_rank] -= num_drafts
                builder.decode(seq, num_drafts, max_kv_len)
        return lengths

    def _plan_extended(self, builder: PlanBuilder) -> None:
        """Outputs that go on with tokens which were not drawn (`_take_known`), as chunks: they
        wait for no prompt either."""
        for seq in self._running:
            if seq.is_extended and not builder.has(seq):
                self._plan_chunk(builder, seq)

    def _most_beside_decodes(self) -> int:
        num_prefilling = sum(seq.is_prefilling for seq in self._running)
        num_new = num_prefilling + min(len(self._waiting), sum(map(len, self._free_rows)))
        return self._chunk_limit(num_new, len(self._running) - num_prefilling)

    def _may_decode(self, seq: Sequence) -> bool:
        is_free = seq.num_in_flight < self._max_in_flight
        return is_free and not seq.is_prefilling and seq.wants_tokens

    def _num_drafts(self, seq: Sequence, num_spare: int) -> int:
        """Of what its row has drafted: as much as may be of use, and never a block of another's."""
        if not seq.num_drafts or not seq.request.takes_drafts:
            return 0
        num_drafts = max(0, min(seq.num_drafts, seq.num_wanted - 1, num_spare))
        assert seq.holder is not None
        most = seq.num_tokens + seq.num_pending + num_drafts
        return num_drafts if self._kvs[seq.dp_rank].shortfall(seq.holder, most) <= 0 else 0

    def _reserve_blocks(self, builder: PlanBuilder, seq: Sequence, max_kv_len: int) -> bool:
        """Blocks for `seq` up to `max_kv_len`, if need be taken from others (`policy.victim`)."""
        kv = self._kvs[seq.dp_rank]
        assert seq.holder is not None
        if not kv.needs_blocks(seq.holder, max_kv_len):
            return True
        if seq.dp_rank in builder.blocked_dp_ranks:
            return False
        while kv.shortfall(seq.holder, max_kv_len) > 0:
            peers = [s for s in self._running if s.dp_rank == seq.dp_rank]
            if any(s.is_leaving for s in peers):
                break
            leaving = victim(s for s in peers if not builder.has(s))
            self._preempt(builder, leaving)
            if leaving is seq:
                return False
        if kv.grow(seq.holder, max_kv_len):
            return True
        # They come with the commit of a step in flight. Nobody younger takes them.
        builder.blocked_dp_ranks.add(seq.dp_rank)
        return False

    def _preempt(self, builder: PlanBuilder, seq: Sequence) -> None:
        """At once, or if its blocks go to host memory when its steps in flight have committed: no
        block of it is free earlier, and the tokens that they bring are kept."""
        kv = self._kvs[seq.dp_rank]
        assert seq.holder is not None
        num_fed = seq.num_tokens - 1  # its last token has not been fed
        if seq.has_prefilled and not seq.is_prefilling:
            if seq.num_in_flight and kv.can_swap_out(seq.holder, num_fed):
                seq.is_leaving = True
                return
            if not seq.num_in_flight:
                kv.swap_out(seq.id, seq.holder, num_fed, builder.step_id)
        self._counters.preemptions += 1
        self._give_back(seq)
        seq.preempt()
        self._waiting.add(seq)

    def _preempt_leaving(self, builder: PlanBuilder) -> None:
        for seq in [s for s in self._running if s.is_leaving and not s.num_in_flight]:
            self._preempt(builder, seq)

    def _plan_chunks(self, builder: PlanBuilder) -> None:
        for seq in self._running:
            if not seq.is_prefilling or builder.has(seq):
                continue
            if seq.num_in_flight < self._config.depth:  # a chunk needs no result of those before
                self._plan_chunk(builder, seq)

    def _chunk_size(self, builder: PlanBuilder, dp_rank: int, start: int, num_left: int) -> int:
        """How many of `num_left` tokens to prefill from `start` in this step; 0: not now."""
        # One that grew beyond the budget before it was preempted comes back in chunks anyway.
        if not self._config.chunked_prefill and num_left <= self._config.max_num_tokens:
            return num_left if num_left <= builder.budgets[dp_rank] else 0
        num_tokens = min(num_left, builder.budgets[dp_rank])
        return self._kvs[dp_rank].chunk_limit(start, num_tokens, start + num_left)

    def _plan_chunk(self, builder: PlanBuilder, seq: Sequence) -> None:
        num_left = seq.num_prefill - seq.num_planned
        num_tokens = self._chunk_size(builder, seq.dp_rank, seq.num_planned, num_left)
        if num_tokens:
            assert seq.holder is not None
            has_room = self._kvs[seq.dp_rank].grow(seq.holder, seq.num_planned + num_tokens)
            assert has_room, "what was not reserved at the start is never short"
            self._before_step(builder, seq, seq.num_planned)
            if seq.is_extended:
                builder.join(seq, seq.num_planned)
                seq.is_extended = False
            self._counters.prefill_chunks += 1
            builder.prefill(seq, num_tokens)

    def _before_step(self, builder: PlanBuilder, seq: Sequence, num_computed: int) -> None:
        assert seq.holder is not None
        tokens = seq.tokens[: seq.num_prefill]
        kv = self._kvs[seq.dp_rank]
        kv.before_step(seq.holder, tokens, num_computed, builder.step_id)

    def _admit(self, builder: PlanBuilder) -> None:
        for seq in self._waiting:
            dp_ranks = [
                dp_rank
                for dp_rank, rows in enumerate(self._free_rows)
                if rows and builder.budgets[dp_rank] > 0 and dp_rank not in builder.blocked_dp_ranks
            ]
            if not dp_ranks:
                self._held_up = seq, not any(self._free_rows)
                return
            if not self._may_pass(seq):
                continue
            most = self._config.max_batch_size
            loads = {dp_rank: most - len(self._free_rows[dp_rank]) for dp_rank in dp_ranks}
            ranks = self._placement.order(seq, loads)
            if not any(self._start(builder, seq, dp_rank) for dp_rank in ranks):
                return  # nobody overtakes a request that waits for room
            self._plan_chunk(builder, seq)

    def _may_pass(self, seq: Sequence) -> bool:
        try:
            return all(gate.ready(seq.request) for gate in self._gates)
        except RequestError as error:
            self._refused.append(self._fail(seq, error.message))
            return False

    def _start(self, builder: PlanBuilder, seq: Sequence, dp_rank: int) -> bool:
        """Give it a row and blocks on that rank, behind the prefix found there. False: not now."""
        kv = self._kvs[dp_rank]
        if kv.is_swapping_out(seq.id, builder.step_id):
            return False
        # Prompt log-probabilities need every position computed; otherwise one token must be left.
        needs_all = seq.request.sampling.prompt_logprobs is not None and not seq.has_prefilled
        limit = 0 if needs_all else seq.num_tokens - 1
        match = kv.match(seq.extra_keys, seq.tokens, limit, seq.id)
        num_computed = match.num_computed
        if not self._chunk_size(builder, dp_rank, num_computed, seq.num_tokens - num_computed):
            return False
        peers = [s for s in self._running if s.dp_rank == dp_rank]
        policy = self._config.capacity_policy
        if not may_start(policy, kv, seq, match, peers, self._lengths):
            self._held_up = seq, True
            return False
        holder = kv.open(match, seq.num_tokens)
        self._kvs[seq.dp_rank].drop_swapped(seq.id)
        self._waiting.remove(seq)
        seq.start(dp_rank, self._free_rows[dp_rank].pop(), holder, match.num_tokens, num_computed)
        self._running.append(seq)
        seq.account.num_running += 1
        self._running.sort(key=lambda s: s.sort_key)
        if seq.epoch == 0:
            seq.num_cached = match.num_tokens
            seq.account.num_tokens += seq.num_tokens - match.num_tokens
            self._counters.prefix_query_tokens += seq.num_tokens
            self._counters.prefix_hit_tokens += match.num_tokens
        builder.join(seq, num_computed)
        return True

    def late_entries(self) -> list[LateEntry]:
        """Of the oldest step in flight: those whose sampling depends on the commits before it."""
        _, entries = self._in_flight[0]
        found, position = [], 0
        for entry in entries:
            seq, num_rows = entry.seq, entry.num_logit_rows
            if num_rows and seq.request.late_inputs and self._is_live(entry):
                drafts = [one for one in seq.drafts[: num_rows - 1] if one >= 0]
                found.append(LateEntry(seq.request, position, drafts, seq.num_void > 0))
            position += num_rows
        return found

    # Up: one result

    def commit(self, result: StepResult) -> list[TokenDelta]:
        """Take over what a step found; results arrive in the order of the plans."""
        step_id, entries = self._in_flight.popleft()
        assert result.step_id == step_id, (result.step_id, step_id)
        deltas: list[TokenDelta] = []
        # As lists at once: one number out of an array takes as long as the rest of an entry.
        tokens, numbers = result.token_ids.tolist(), result.num_accepted.tolist()
        num_drafts, drafts = result.drafts()
        for i, entry in enumerate(entries):
            if not self._is_live(entry):
                continue
            seq = entry.seq
            seq.num_drafts = num_drafts[i]
            if drafts is not None:
                seq.drafts = drafts[i]
            if why := result.error or result.failures.get(i):
                deltas.append(self._fail(seq, why))
            elif delta := self._commit_entry(entry, i, tokens[i][: numbers[i]], result):
                deltas.append(delta)
        for kv in self._kvs:
            kv.commit(step_id, failed=result.error is not None)
        self._counters.steps += 1
        self._gauge()
        return deltas

    def _is_live(self, entry: Entry) -> bool:
        """Its sequence has neither ended nor been preempted since it was planned."""
        return entry.seq.state is State.RUNNING and entry.seq.epoch == entry.epoch

    def _commit_entry(
        self, entry: Entry, i: int, new_ids: list[int], result: StepResult
    ) -> TokenDelta | None:
        seq = entry.seq
        seq.num_in_flight -= 1
        if seq.num_void:
            seq.num_void -= 1
            return None
        if entry.start != FROM_DEVICE:
            self._counters.prompt_tokens += entry.num_tokens
        prompt_logprobs: tuple[TokenLogprob, ...] = ()
        if i in result.prompt_logprobs:
            prompt_logprobs = new_prompt_logprobs(entry, result.prompt_logprobs[i])
        if not entry.num_logit_rows:
            self._index(seq, entry.start + entry.num_tokens)
            if not prompt_logprobs:
                return None
            return TokenDelta(request_id=seq.id, prompt_logprobs=prompt_logprobs)
        seq.num_pending -= entry.num_logit_rows
        seq.num_steps += 1
        reason, num_before = None, seq.num_output
        for token_id in new_ids:
            seq.append(token_id)
            if reason := finish_reason(seq, token_id):
                break
        num_new = seq.num_output - num_before
        if seq.request.late_inputs:
            for follower in self._followers:
                if why := follower.on_commit(seq.request, new_ids[:num_new]):
                    return self._fail(seq, why)
        if i in result.logprobs:
            seq.unreported_logprobs += logprob_tuple(result.logprobs[i])[:num_new]
        self._counters.generated_tokens += num_new
        if entry.start == FROM_DEVICE:
            self._counters.decodes += 1
            self._counters.drafted_tokens += entry.num_tokens - 1
            self._counters.accepted_tokens += num_new - 1
        seq.account.num_tokens += num_new
        seq.has_prefilled = True
        self._index(seq, seq.num_tokens - 1)
        if reason is None and seq.request.late_inputs and (why := self._take_known(seq)):
            return self._fail(seq, why)
        if reason is None and not seq.is_report_due and not prompt_logprobs:
            return None
        delta = report(seq, prompt_logprobs, reason, result.pooled.get(i))
        if reason is not None:
            self._counters.finished += 1
            self._lengths.add(seq.num_output)
            self._close(seq, reason)
        return delta

    def _take_known(self, seq: Sequence) -> str | None:
        """Jump-forward: tokens that must come next need not be drawn, unless their
        log-probabilities are wanted; the one that ends an output always is. Returns why the
        request must fail, if so.

        A chunk in a step of decodes makes all of them wait, so it must be the longer the more
        sequences run."""
        least = max(_MIN_KNOWN, 1 + math.ceil(_CHUNK_COST * len(self._running)))
        is_asked = seq.request.sampling.logprobs is not None
        if is_asked or seq.is_leaving or least > _MAX_KNOWN:
            return None
        most = seq.request.max_tokens - seq.num_output - 1
        for follower in self._followers:
            known = follower.known_tokens(seq.request)[:most]
            known = list(takewhile(lambda one: one not in seq.request.stop_ids, known))
            assert seq.holder is not None
            kv = self._kvs[seq.dp_rank]
            if len(known) < least or not kv.grow(seq.holder, seq.num_tokens + len(known)):
                continue
            seq.extend(known)
            self._counters.generated_tokens += len(known)
            self._counters.known_tokens += len(known)
            seq.account.num_tokens += len(known)
            for told in self._followers:
                if why := told.on_commit(seq.request, known):
                    return why
            return None
        return None

    def _index(self, seq: Sequence, num_computed: int) -> None:
        assert seq.holder is not None
        self._kvs[seq.dp_rank].index(seq.holder, seq.tokens, num_computed)

    # How a request ends

    def _fail(self, seq: Sequence, message: str) -> TokenDelta:
        self._counters.failed += 1
        self._close(seq, FinishReason.ERROR)
        return TokenDelta(request_id=seq.id, finish=FinishReason.ERROR, error=message)

    def _close(self, seq: Sequence, reason: FinishReason) -> TokenDelta:
        if seq.state is State.WAITING:
            self._kvs[seq.dp_rank].drop_swapped(seq.id)
            self._waiting.remove(seq)
        else:
            self._give_back(seq)
        seq.finish()
        if seq.request.has_followers:
            for follower in self._followers:
                follower.on_close(seq.request)
        del self._by_id[seq.id]
        self._gauge()
        return TokenDelta(request_id=seq.id, finish=reason)

    def _give_back(self, seq: Sequence) -> None:
        """Row and blocks of a running sequence. Steps run in order: the row is free at once."""
        assert seq.holder is not None
        self._kvs[seq.dp_rank].close(seq.holder, seq.last_step)
        self._free_rows[seq.dp_rank].append(seq.row)
        self._running.remove(seq)
        seq.account.num_running -= 1

    def _gauge(self) -> None:
        counters = self._counters
        counters.running = len(self._running)
        counters.waiting = len(self._waiting)
        counters.swapped_out_blocks = sum(kv.num_swapped_out for kv in self._kvs)
        counters.swapped_in_blocks = sum(kv.num_swapped_in for kv in self._kvs)
        counters.used_blocks = sum(kv.num_held for kv in self._kvs)
        counters.cached_blocks = sum(kv.num_reusable for kv in self._kvs)
