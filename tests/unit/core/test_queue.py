"""Nobody waits for what another has queued: order within a tenant, shares between them."""

from collections import Counter, defaultdict

import pytest
from core_engine import Engine
from fake_executor import oracle
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config.run import CapacityPolicy
from penstock.core.queue import WaitingQueue
from penstock.core.sequence import Sequence
from penstock.types.request import FinishReason, Request
from penstock.types.sampling import SamplingParams

_MOST = 20  # tokens of one request in the properties
WEIGHTS = (1.0, 2.0, 0.5, 4.0)


class Queue:
    """A `WaitingQueue`, and a count of what every tenant was served by it."""

    def __init__(self) -> None:
        self.queue = WaitingQueue()
        self.waiting: dict[int, list[Sequence]] = defaultdict(list)  # in order of arrival
        self.cost: dict[int, int] = {}
        self.served: Counter[int] = Counter()
        self.num_arrived = 0

    def add(self, tenant: int, cost: int = 1, priority: int = 0) -> Sequence:
        request = Request(
            id=self.num_arrived, prompt_ids=(1,), sampling=SamplingParams(), max_tokens=1,
            tenant=tenant, weight=WEIGHTS[tenant % len(WEIGHTS)], priority=priority,
        )  # fmt: skip
        seq = Sequence(request, (-priority, self.num_arrived))
        self.num_arrived += 1
        self.queue.add(seq)
        self.waiting[tenant].append(seq)
        self.cost[seq.id] = cost
        return seq

    def remove(self, seq: Sequence) -> None:
        self.queue.remove(seq)
        self.waiting[seq.request.tenant].remove(seq)

    def serve(self) -> Sequence:
        """The next one starts and is charged, as the scheduler does."""
        seq = next(iter(self.queue))
        self.remove(seq)
        self.charge(seq, self.cost[seq.id])
        return seq

    def charge(self, seq: Sequence, num_tokens: int) -> None:
        seq.account.num_tokens += num_tokens
        self.served[seq.request.tenant] += num_tokens

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self.waiting.values()))


events = st.lists(
    st.one_of(
        st.tuples(
            st.just("add"), st.integers(0, 3), st.integers(1, _MOST), st.integers(-1, 1)
        ),
        st.tuples(st.just("serve")),
        st.tuples(st.just("abort"), st.integers(0, 10)),
    ),
    max_size=120,
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(events)
def test_it_always_hands_out_who_waits_and_within_a_tenant_in_order(given_events):
    queue = Queue()
    for event in given_events:
        if event[0] == "add":
            queue.add(*event[1:])
        elif event[0] == "serve" and queue.num_waiting:
            expected = {
                tenant: min(seqs, key=lambda seq: seq.sort_key)
                for tenant, seqs in queue.waiting.items()
                if seqs
            }
            seq = queue.serve()  # work-conserving: whoever waits, somebody is handed out
            assert seq is expected[seq.request.tenant]
        elif event[0] == "abort" and queue.num_waiting:
            everyone = [seq for seqs in queue.waiting.values() for seq in seqs]
            queue.remove(everyone[event[1] % len(everyone)])
        assert len(queue.queue) == queue.num_waiting
        everyone = {seq.id for seqs in queue.waiting.values() for seq in seqs}
        walked = [seq.id for seq in queue.queue]
        assert len(walked) == len(everyone) and set(walked) == everyone
        assert len(queue.queue._order) <= 2 * 4 + 8


@settings(max_examples=200, deadline=None)
@given(
    before=events,
    tenants=st.sets(st.integers(0, 3), min_size=2),
    costs=st.lists(st.integers(1, _MOST), min_size=8, max_size=8),
    num_served=st.integers(1, 150),
)
def test_tenants_that_wait_are_served_by_weight_within_one_request(
    before, tenants, costs, num_served
):
    queue = Queue()
    for event in before:  # whatever was before: nobody is owed or owes for it
        if event[0] == "add":
            queue.add(event[1], event[2])
        elif event[0] == "serve" and queue.num_waiting:
            queue.serve()
    while queue.num_waiting:
        queue.serve()
    for i in range(num_served):
        for tenant in tenants:
            queue.add(tenant, costs[(i + tenant) % len(costs)])
    start = Counter(queue.served)
    level = {t: queue.queue._lines[t].account.served for t in tenants}
    for _ in range(num_served):
        queue.serve()
        shares = [
            level[t] - min(level.values()) + (queue.served[t] - start[t]) / WEIGHTS[t]
            for t in tenants
        ]
        most = max(_MOST / WEIGHTS[t] for t in tenants)
        # Who was far ahead waits for the others; the others among themselves are never further
        # apart than one request.
        ahead = max(level.values()) - min(level.values())
        assert max(shares) - min(shares) <= max(most, ahead)
        active = [t for t in tenants if queue.served[t] > start[t]]
        own = [level[t] + (queue.served[t] - start[t]) / WEIGHTS[t] for t in active]
        assert max(own) - min(own) <= most


@settings(max_examples=200, deadline=None)
@given(
    queued=st.lists(st.tuples(st.integers(1, 3), st.integers(1, _MOST)), max_size=60),
    more=st.lists(st.tuples(st.integers(1, 3), st.integers(1, _MOST)), min_size=40, max_size=40),
)
def test_whoever_waits_is_served_before_each_other_had_more_than_its_share(queued, more):
    queue = Queue()
    for tenant, cost in queued:
        queue.add(tenant, cost)
    mine = queue.add(0)
    before = Counter(queue.served)
    for tenant, cost in more:  # others go on arriving, newer than it
        queue.add(tenant, cost)
        if queue.serve() is mine:
            break
    else:
        raise AssertionError("it waits for ever")
    for tenant in (1, 2, 3):
        assert queue.served[tenant] - before[tenant] <= _MOST + WEIGHTS[tenant] * 1


def test_tokens_written_count_like_those_of_prompts():
    queue = Queue()
    running = [queue.add(tenant) for tenant in (0, 4)]  # of equal weights
    for _ in running:
        queue.serve()
    for _ in range(4):
        queue.add(0), queue.add(4)
    queue.charge(running[0], 100)  # what runs writes
    assert [queue.serve().request.tenant for _ in range(4)] == [4] * 4


def test_nobody_saves_up_turns_by_being_idle():
    queue = Queue()
    for _ in range(50):
        queue.add(0, cost=10)
        queue.serve()
    for _ in range(6):  # the other one begins now: equal shares from here on, not 500 tokens first
        queue.add(4, cost=10), queue.add(0, cost=10)
    order = [queue.serve().request.tenant for _ in range(8)]
    assert Counter(order) == {0: 4, 4: 4}


def test_lines_that_come_and_go_leave_nothing_behind():
    queue = Queue()
    queue.add(0)
    for _ in range(10_000):
        queue.remove(queue.add(1))
    assert len(queue.queue._order) < 20
    assert queue.serve().request.tenant == 0


def steps_until(engine: Engine, is_there, most: int = 400) -> int:
    """Plans that were made meanwhile."""
    before = len(engine.device.plans)
    while not is_there():
        engine.loop.turn()
        assert len(engine.device.plans) - before < most, "it waits too long"
    return len(engine.device.plans) - before


@pytest.mark.parametrize("depth", [1, 2])
def test_eight_thousand_queued_requests_of_another_delay_one_by_a_step(depth):
    engine = Engine(num_blocks=200, max_batch_size=4, max_num_tokens=64, depth=depth)
    flood = [engine.submit((i % 50, 1), max_tokens=40, tenant=1) for i in range(8000)]
    for _ in range(20):
        engine.loop.turn()
    one = engine.submit((7, 7, 7), max_tokens=3, tenant=2)
    num_steps = steps_until(engine, lambda: engine.tokens[one])
    # One plan finds no row, the next one gives it one; with two in flight one was planned before.
    assert num_steps == 1 + depth
    assert engine.counters.preemptions == 1 and not any(engine.ends[rid] for rid in flood)
    steps_until(engine, lambda: engine.ends[one])
    assert engine.tokens[one] == oracle((7, 7, 7), 3)
    assert engine.ends[one] == [FinishReason.LENGTH]
    steps_until(engine, lambda: all(engine.ends[rid] for rid in flood[:12]))
    for i, rid in enumerate(flood[:12]):
        assert engine.tokens[rid] == oracle((i, 1), 40)


def test_as_one_tenant_it_would_have_waited_for_all_of_them():
    """The same traffic without tenants, so that the test above is known to be able to fail."""
    engine = Engine(num_blocks=200, max_batch_size=4, max_num_tokens=64)
    for i in range(200):
        engine.submit((i % 50, 1), max_tokens=40)
    one = engine.submit((7, 7, 7), max_tokens=3)
    for _ in range(200):
        engine.loop.turn()
    assert not engine.tokens[one]
    assert engine.counters.preemptions == 0


def test_a_cache_that_another_has_filled_delays_one_by_as_many_steps_as_must_leave():
    engine = Engine(num_blocks=17, max_batch_size=8, max_num_tokens=64)
    for i in range(50):
        engine.submit((i, 2, 3, 4, 5, 6, 7, 8), max_tokens=20, tenant=1)
    for _ in range(4):
        engine.turn()
    one = engine.submit(tuple(range(9, 20)), max_tokens=3, tenant=2)  # 3 blocks and the spare ones
    assert steps_until(engine, lambda: engine.tokens[one]) <= 6


def test_a_prompt_in_chunks_delays_the_one_of_another_by_a_step():
    engine = Engine(num_blocks=200, max_batch_size=4, max_num_tokens=8, max_seq_len=400)
    for i in range(4):
        engine.submit([i, *range(160)], max_tokens=4, tenant=1)
    for _ in range(60):
        engine.turn()  # some decode, one prefills: 8 tokens a step
    assert any(seq.is_prefilling for seq in engine.scheduler.running)
    one = engine.submit((7, 7, 7), max_tokens=1, tenant=2)
    assert steps_until(engine, lambda: engine.tokens[one]) <= 3
    engine.run_dry()
    engine.assert_empty()


def test_where_nobody_ever_leaves_one_gets_the_next_free_row():
    policy = CapacityPolicy.GUARANTEED_NO_EVICT
    engine = Engine(num_blocks=200, max_batch_size=4, max_num_tokens=64, capacity_policy=policy)
    flood = [engine.submit((i,), max_tokens=10 + 5 * i, tenant=1) for i in range(30)]
    for _ in range(4):
        engine.turn()
    one = engine.submit((7, 7), max_tokens=2, tenant=2)
    steps_until(engine, lambda: engine.tokens[one])
    assert [bool(engine.ends[rid]) for rid in flood[:3]] == [True, False, False]
    engine.run_dry()
    assert engine.counters.preemptions == 0


def test_who_has_one_place_keeps_it():
    engine = Engine(num_blocks=200, max_batch_size=3, max_num_tokens=64)
    for tenant in range(6):
        for _ in range(3):
            engine.submit((tenant,), max_tokens=9, tenant=tenant)
    engine.run_dry()
    assert engine.counters.preemptions == 0
    assert all(len(ends) == 1 for ends in engine.ends.values())


def test_a_tenant_gets_one_place_at_once_and_more_as_they_become_free():
    engine = Engine(num_blocks=200, max_batch_size=4, max_num_tokens=64)
    for i in range(8):
        engine.submit((i,), max_tokens=30, tenant=1)
    for _ in range(6):
        engine.turn()
    for i in range(4):
        engine.submit((i, i), max_tokens=10, tenant=2)
    for _ in range(8):
        engine.turn()
    assert [seq.request.tenant for seq in engine.scheduler.running].count(2) == 1
    assert engine.counters.preemptions == 1


def test_a_cache_that_runs_out_takes_from_whoever_has_had_most():
    """By arrival alone, the newcomer would be preempted by every old request of the other."""
    engine = Engine(num_blocks=12, max_batch_size=3, max_num_tokens=32)
    old = [engine.submit((i, 2, 3, 4), max_tokens=30, tenant=1) for i in range(6)]
    for _ in range(12):
        engine.turn()
    new = engine.submit((9, 9), max_tokens=10, tenant=2)
    while not engine.ends[new]:
        lives = [seq.epoch for seq in engine.scheduler._by_id.values() if seq.id == new]
        assert lives in ([], [0]), "the newcomer was preempted"
        engine.turn()
    assert engine.counters.preemptions > 0
    engine.run_dry()
    assert all(engine.tokens[rid] == oracle((i, 2, 3, 4), 30) for i, rid in enumerate(old))
    engine.assert_empty()
