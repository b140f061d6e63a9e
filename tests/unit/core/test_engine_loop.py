"""The ten contracts of the spine on a fake device: any traffic, any depth, the right tokens."""

import itertools
from collections import defaultdict, deque
from dataclasses import replace

import numpy as np
import pytest
from fake_executor import STATE, FakeExecutor, oracle
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config.run import CapacityPolicy, QueuePolicy, RunConfig
from penstock.core.gates import LeaderGate
from penstock.core.kv import groups
from penstock.core.kv.groups import NO_BLOCK, FullGroup, StateGroup, WindowGroup
from penstock.core.kv.invariants import check
from penstock.core.kv.manager import KVManager
from penstock.core.loop import EngineLoop
from penstock.core.plan import Draft
from penstock.core.scheduler import Scheduler
from penstock.ipc.messages import Abort, ClientLeft, Deltas, Stats, Submit
from penstock.types.request import FinishReason, Request, request_id
from penstock.types.sampling import SamplingParams
from penstock.types.stats import EngineCounters
from penstock.types.step import Move


def run_config(**changes) -> RunConfig:
    values = dict(
        model="m", model_path="m", load_format="dummy", dtype="float32", device="cpu",
        num_threads=1, tp_size=1, max_batch_size=4, max_num_tokens=8, max_seq_len=64,
        max_queued=100, chunked_prefill=True, capacity_policy=CapacityPolicy.MAX_UTILIZATION,
        depth=1, tokens_per_block=4, block_reuse=True, partial_reuse=True, kv_dtype="float32",
        kv_max_tokens=None, kv_memory_fraction=0.9, kv_cpu_bytes=0, attention_backend="reference",
        graph_batch_sizes=(), graph_padding=True, seed=0, state_interval=8,
    )  # fmt: skip
    return RunConfig(**(values | changes))


class Engine:
    """Loop, scheduler and fake device, with the mail boxes in the test's hands."""

    def __init__(
        self,
        num_blocks=17,
        num_ranks=1,
        accept=None,
        tokens_per_decode=1,
        window=None,
        num_states=None,
        num_places=0,
        **changes,
    ):
        self.config = run_config(**changes)
        self.counters = EngineCounters()
        c = self.config
        reuse = (c.block_reuse, c.partial_reuse)
        self.kvs = []
        for _ in range(num_ranks):
            own = [FullGroup(num_blocks, c.tokens_per_block, *reuse)]
            if window is not None:
                num_needed = WindowGroup.blocks_needed(
                    window, c.tokens_per_block, c.max_batch_size, c.max_num_tokens, c.depth
                )
                own.append(WindowGroup(num_needed, c.tokens_per_block, window, *reuse))
            if num_states is not None:
                num_needed = StateGroup.blocks_needed(c.max_batch_size) + num_states
                own.append(
                    StateGroup(
                        num_needed,
                        c.tokens_per_block,
                        c.state_interval,
                        c.max_batch_size,
                        c.block_reuse,
                    )
                )
            self.kvs.append(KVManager(own, num_places))
        self.scheduler = Scheduler(c, self.kvs, self.counters, tokens_per_decode=tokens_per_decode)
        self.scheduler.add_gate(LeaderGate(self.scheduler.has_prefilled))
        windows = [None]
        windows += [] if window is None else [window]
        windows += [] if num_states is None else [STATE]
        self.device = FakeExecutor(
            num_ranks, c.tokens_per_block, accept or (lambda text: 1), windows
        )
        self.inbox: deque = deque()
        self.tokens = defaultdict(list)
        self.ends = defaultdict(list)
        self.loop = EngineLoop(
            self.scheduler, self.device, self, self, self.counters, c.depth,
            clock=itertools.count().__next__, describe=lambda plan, started: None,
        )  # fmt: skip
        self.serial = itertools.count()

    def receive(self, timeout_ms):
        return self.inbox.popleft() if self.inbox else None

    def send(self, client_id, message):
        assert isinstance(message, Deltas)
        for delta in message.deltas:
            assert not self.ends[delta.request_id], "news after the terminal event"
            self.tokens[delta.request_id] += delta.token_ids
            if delta.finish:
                self.ends[delta.request_id].append(delta.finish)

    def broadcast(self, message):
        assert isinstance(message, Stats)

    def submit(self, prompt, max_tokens=6, client=1, **fields) -> int:
        rid = request_id(client, next(self.serial))
        request = Request(
            id=rid,
            prompt_ids=tuple(prompt),
            sampling=SamplingParams(),
            max_tokens=max_tokens,
            **fields,
        )
        self.inbox.append(Submit(requests=(request,)))
        return rid

    def turn(self):
        self.loop.turn()
        self.check()

    def check(self):
        for rank, kv in enumerate(self.kvs):
            kept = [
                s.kept for s in self.scheduler._waiting if s.rank == rank and s.kept is not None
            ]
            check(kv, [s.holder for s in self.scheduler.running if s.rank == rank], kept)

    def run_dry(self, limit=5000):
        for _ in range(limit):
            self.turn()
            if not self.inbox and not self.scheduler.has_work and not self.loop._steps:
                return
        raise AssertionError("the engine does not come to rest")

    def assert_empty(self):
        assert all(kv.num_held == 0 for kv in self.kvs)
        assert all(g.pool.num_quarantined == 0 for kv in self.kvs for g in kv.groups)
        assert all(kv.num_free_places == kv.num_places for kv in self.kvs)
        for rows in self.scheduler._free_rows:
            assert sorted(rows) == list(range(self.config.max_batch_size))


PROMPT = tuple(range(1, 12))


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_one_request_gives_the_oracle_tokens_at_any_depth(depth):
    engine = Engine(depth=depth)
    rid = engine.submit(PROMPT, max_tokens=9)
    engine.run_dry()
    assert engine.tokens[rid] == oracle(PROMPT, 9)
    assert engine.ends[rid] == [FinishReason.LENGTH]
    assert engine.counters.max_steps_in_flight == depth
    assert engine.counters.prefill_chunks == 2
    engine.assert_empty()


def test_a_stop_id_ends_the_request_and_late_tokens_are_dropped():
    expected = oracle(PROMPT, 20)
    engine = Engine(depth=4)
    rid = engine.submit(PROMPT, max_tokens=20, stop_ids=(expected[3],))
    engine.run_dry()
    assert engine.tokens[rid] == expected[:4]
    assert engine.ends[rid] == [FinishReason.STOP]
    engine.assert_empty()


def test_a_second_equal_prompt_takes_its_prefix_from_the_cache():
    engine = Engine()
    engine.submit(PROMPT)
    engine.run_dry()
    rid = engine.submit(PROMPT)
    engine.run_dry()
    # Two full blocks, and two of the three tokens that are left after them: one is always computed.
    assert engine.counters.prefix_hit_tokens == 10
    assert engine.tokens[rid] == oracle(PROMPT, 6)


def test_reports_come_for_the_first_token_every_nth_and_the_last():
    engine = Engine(num_blocks=40)
    rid = engine.submit(PROMPT, max_tokens=10, report_every=4)
    sizes = []
    while not engine.ends[rid]:
        before = len(engine.tokens[rid])
        engine.turn()
        if len(engine.tokens[rid]) > before:
            sizes.append(len(engine.tokens[rid]))
    assert sizes == [1, 4, 8, 10]
    assert engine.tokens[rid] == oracle(PROMPT, 10)


def test_another_cache_key_shares_nothing():
    engine = Engine()
    engine.submit(PROMPT, cache_keys=("a",))
    engine.run_dry()
    engine.submit(PROMPT, cache_keys=("b",))
    engine.run_dry()
    assert engine.counters.prefix_hit_tokens == 0


def test_reuse_can_be_turned_off():
    engine = Engine(block_reuse=False)
    for _ in range(2):
        engine.submit(PROMPT)
        engine.run_dry()
    assert engine.counters.prefix_hit_tokens == 0
    assert engine.counters.cached_blocks == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_a_full_pool_preempts_the_youngest_and_everybody_still_gets_the_right_tokens(depth):
    engine = Engine(num_blocks=9, depth=depth, max_num_tokens=32)
    prompts = [(i, i + 1, i + 2, i + 3) for i in range(3)]
    rids = [engine.submit(p, max_tokens=20) for p in prompts]
    engine.run_dry()
    assert engine.counters.preemptions >= 1
    for rid, prompt in zip(rids, prompts, strict=True):
        assert engine.tokens[rid] == oracle(prompt, 20)
    engine.assert_empty()


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("reuse", [False, True])
def test_what_host_memory_keeps_of_a_preempted_request_is_not_computed_again(depth, reuse):
    def run(num_places):
        engine = Engine(
            num_blocks=9, depth=depth, max_num_tokens=32, block_reuse=reuse, num_places=num_places
        )
        prompts = [(i, i + 1, i + 2, i + 3) for i in range(3)]
        rids = [engine.submit(p, max_tokens=20) for p in prompts]
        engine.run_dry()
        for rid, prompt in zip(rids, prompts, strict=True):
            assert engine.tokens[rid] == oracle(prompt, 20)
        engine.assert_empty()
        return engine.counters

    without, some, enough = run(0), run(5), run(40)
    assert without.preemptions >= 1 and without.kept_blocks == without.fetched_blocks == 0
    assert enough.kept_blocks > 0 and 0 < enough.fetched_blocks <= enough.kept_blocks
    assert enough.prompt_tokens == 12 + enough.preemptions  # one token of each that comes back
    assert enough.prompt_tokens < some.prompt_tokens <= without.prompt_tokens


def test_an_abort_gives_back_what_host_memory_keeps():
    engine = Engine(num_blocks=9, max_num_tokens=32, num_places=40)
    rids = [engine.submit((i, i + 1, i + 2, i + 3), max_tokens=20) for i in range(3)]
    while not engine.counters.kept_blocks:
        engine.turn()
    assert engine.kvs[0].num_free_places < 40
    engine.inbox.append(Abort(request_ids=tuple(rids)))
    engine.turn()
    engine.run_dry()
    engine.assert_empty()


def test_after_a_failed_step_nothing_is_taken_from_host_memory():
    engine = Engine(num_blocks=9, max_num_tokens=32, num_places=40)
    prompts = [(i, i + 1, i + 2, i + 3) for i in range(3)]
    rids = [engine.submit(p, max_tokens=20) for p in prompts]
    while not engine.counters.kept_blocks:
        engine.turn()
    object.__setattr__(engine.device.handles[-1].result, "error", "out of memory")
    engine.run_dry()
    ends = [engine.ends[rid] for rid in rids]
    assert ends.count([FinishReason.ERROR]) == 2 and ends.count([FinishReason.LENGTH]) == 1
    survivor = ends.index([FinishReason.LENGTH])
    assert engine.tokens[rids[survivor]] == oracle(prompts[survivor], 20)
    assert engine.counters.fetched_blocks == 0
    engine.assert_empty()


@pytest.mark.parametrize(
    ("depth", "lengths", "nth"),
    [
        (2, [(12, 12), (8, 8), (6, 11), (8, 4), (3, 5), (5, 5)], 1),
        (4, [(9, 22), (7, 12), (9, 15), (8, 16), (2, 10)], 2),
    ],
)
def test_what_a_failed_step_should_have_kept_is_never_taken_back(monkeypatch, depth, lengths, nth):
    """Although there is room for it again before the failure is known."""
    engine = Engine(
        num_blocks=13, depth=depth, max_num_tokens=32, max_batch_size=6, num_places=60
    )  # fmt: skip
    forward, sample = engine.device.forward, engine.device.sample
    steps_out: list[int] = []

    def without_copies(plan):
        if {op.move for op in plan.cache_ops} == {Move.OUT}:
            steps_out.append(plan.step_id)
            if len(steps_out) == nth + 1:
                plan = replace(plan, cache_ops=())
        forward(plan)

    def failing(step_id, late):
        handle = sample(step_id, late)
        if steps_out[nth : nth + 1] == [step_id]:
            object.__setattr__(handle.result, "error", "out of memory")
        return handle

    monkeypatch.setattr(engine.device, "forward", without_copies)
    monkeypatch.setattr(engine.device, "sample", failing)
    prompts = [tuple((i * 7 + j) % 50 for j in range(num)) for i, (num, _) in enumerate(lengths)]
    rids = [engine.submit(p, m) for p, (_, m) in zip(prompts, lengths, strict=True)]
    engine.run_dry()
    assert len(steps_out) > nth and engine.counters.failed
    for rid, prompt, (_, max_tokens) in zip(rids, prompts, lengths, strict=True):
        if engine.ends[rid] != [FinishReason.ERROR]:
            assert engine.tokens[rid] == oracle(prompt, max_tokens)
    engine.assert_empty()


def test_guaranteed_no_evict_never_preempts():
    engine = Engine(num_blocks=9, capacity_policy=CapacityPolicy.GUARANTEED_NO_EVICT, depth=2)
    rids = [engine.submit((i, i + 1, i + 2), max_tokens=12) for i in range(5)]
    engine.run_dry()
    assert engine.counters.preemptions == 0
    assert all(engine.ends[rid] == [FinishReason.LENGTH] for rid in rids)


@pytest.mark.parametrize("policy", CapacityPolicy)
def test_a_request_as_long_as_the_whole_cache_runs(policy):
    engine = Engine(num_blocks=9, capacity_policy=policy, depth=2)
    rid = engine.submit(PROMPT, max_tokens=8 * 4 - len(PROMPT))
    engine.run_dry()
    assert engine.tokens[rid] == oracle(PROMPT, 8 * 4 - len(PROMPT))


def test_a_request_longer_than_the_whole_cache_fails_at_once_and_blocks_nobody():
    engine = Engine(num_blocks=9)
    too_long = engine.submit(PROMPT, max_tokens=40)
    other = engine.submit(PROMPT, max_tokens=2)
    engine.run_dry()
    assert engine.ends[too_long] == [FinishReason.ERROR]
    assert engine.tokens[other] == oracle(PROMPT, 2)


def test_a_larger_priority_is_served_first_and_equal_ones_in_order_of_arrival():
    engine = Engine(max_batch_size=1)
    ids = [engine.submit((i,), max_tokens=1, priority=p) for i, p in enumerate([0, 0, 5])]
    engine.run_dry()
    assert list(engine.ends) == [ids[2], ids[0], ids[1]]


def test_the_fcfs_policy_looks_at_no_priority():
    engine = Engine(max_batch_size=1, queue_policy=QueuePolicy.FCFS)
    ids = [engine.submit((i,), max_tokens=1, priority=p) for i, p in enumerate([0, 0, 5])]
    engine.run_dry()
    assert list(engine.ends) == ids


def test_decodes_go_on_while_a_long_prompt_is_prefilled_in_chunks():
    engine = Engine(num_blocks=40, max_num_tokens=5)
    first = engine.submit((1, 2), max_tokens=30)
    for _ in range(4):
        engine.turn()
    engine.submit(tuple(range(30)), max_tokens=2)
    engine.run_dry()
    mixed = [p for p in engine.device.plans if p.num_decodes and p.num_decodes < p.num_entries]
    assert len(mixed) >= 5
    assert engine.tokens[first] == oracle((1, 2), 30)


def test_without_chunked_prefill_a_prompt_runs_in_one_step():
    engine = Engine(num_blocks=40, chunked_prefill=False, max_num_tokens=12)
    for i in range(3):
        engine.submit(tuple(range(i, i + 10)), max_tokens=3)
    engine.run_dry()
    assert engine.counters.prefill_chunks == 3


def test_further_samples_wait_for_their_leader_and_share_its_prompt():
    engine = Engine(num_blocks=40, max_num_tokens=64)
    leader = engine.submit(PROMPT, max_tokens=3)
    follower = engine.submit(PROMPT, max_tokens=3, leader=leader)
    other = engine.submit((7, 7, 7), max_tokens=3)
    engine.run_dry()
    assert engine.counters.prefix_hit_tokens == 8  # its two full blocks
    assert engine.tokens[follower] == oracle(PROMPT, 3)
    # The follower let the request behind it pass.
    joined = [join.request_id for plan in engine.device.plans for join in plan.joins]
    assert joined == [leader, other, follower]


def test_late_inputs_hold_sampling_back_until_the_step_before_has_committed():
    engine = Engine(depth=4)
    rid = engine.submit(PROMPT, max_tokens=8, late_inputs=True)
    engine.run_dry()
    assert engine.device.num_late > 5
    assert engine.tokens[rid] == oracle(PROMPT, 8)


def test_a_failed_step_fails_its_requests_and_nothing_else():
    engine = Engine(depth=1)
    broken = engine.submit(PROMPT[:4], max_tokens=5)
    engine.turn()
    handle = engine.device.handles[-1]
    object.__setattr__(handle.result, "error", "out of memory")
    engine.run_dry()
    assert engine.ends[broken] == [FinishReason.ERROR]
    after = engine.submit((3, 1), max_tokens=4)
    engine.run_dry()
    assert engine.tokens[after] == oracle((3, 1), 4)
    engine.assert_empty()


def test_abort_frees_a_waiting_and_a_running_request_at_once():
    engine = Engine(max_batch_size=1, depth=2)
    running = engine.submit(PROMPT, max_tokens=30)
    waiting = engine.submit(PROMPT, max_tokens=30)
    for _ in range(6):
        engine.turn()
    engine.inbox.append(Abort(request_ids=(running, waiting, 999)))
    engine.turn()
    assert engine.ends[running] == engine.ends[waiting] == [FinishReason.ABORT]
    engine.run_dry()
    engine.assert_empty()


def test_requests_of_a_front_end_that_left_end_and_those_of_others_do_not():
    engine = Engine(max_batch_size=2, depth=2)
    gone = [engine.submit(PROMPT, max_tokens=30, client=7) for _ in range(3)]
    kept = engine.submit(PROMPT, max_tokens=12, client=8)
    for _ in range(6):
        engine.turn()
    engine.inbox.append(ClientLeft(client_id=7))
    engine.turn()
    assert [engine.ends[rid] for rid in gone] == [[FinishReason.ABORT]] * 3
    engine.run_dry()
    assert engine.tokens[kept] == oracle(PROMPT, 12)
    assert engine.counters.aborted == 3
    engine.assert_empty()


traffic = st.lists(
    st.one_of(
        st.tuples(
            st.just("submit"),
            st.lists(st.integers(0, 2), min_size=1, max_size=18),
            st.integers(1, 12),
            st.integers(0, 1),
            st.booleans(),
            st.booleans(),
            st.integers(1, 5),
        ),
        st.tuples(st.just("abort"), st.integers(0, 30)),
        st.tuples(st.just("turns"), st.integers(1, 6)),
    ),
    max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(
    events=traffic,
    depth=st.sampled_from([1, 2, 4]),
    num_ranks=st.sampled_from([1, 2]),
    tokens_per_decode=st.sampled_from([1, 3]),
    num_blocks=st.integers(15, 30),
    chunked=st.booleans(),
    partial=st.booleans(),
    policy=st.sampled_from(CapacityPolicy),
    window=st.sampled_from([None, None, 1, 3, 6, 9]),
    num_states=st.sampled_from([None, None, 0, 1, 3, 20]),
    num_places=st.sampled_from([0, 3, 100]),
    reuse=st.booleans(),
)
def test_any_traffic_gives_every_request_its_tokens_and_one_end(
    events, depth, num_ranks, tokens_per_decode, num_blocks, chunked, partial, policy, window,
    num_states, num_places, reuse,
):  # fmt: skip
    if num_states is not None:
        tokens_per_decode = 1  # a state cannot go back to before a rejected token
    engine = Engine(
        num_blocks=num_blocks, num_ranks=num_ranks, tokens_per_decode=tokens_per_decode,
        accept=lambda text: 1 + sum(text) % 3, depth=depth, chunked_prefill=chunked,
        max_num_tokens=20 if not chunked else 7, block_reuse=reuse,
        partial_reuse=reuse and partial, capacity_policy=policy, window=window,
        num_states=num_states, num_places=num_places,
    )  # fmt: skip
    asked: dict[int, tuple] = {}
    for event in events:
        if event[0] == "submit":
            _, prompt, max_tokens, priority, late, follows, every = event
            leader = next(reversed(asked), None) if follows else None
            stop_ids = (oracle(tuple(prompt), 12)[-1],)
            rid = engine.submit(
                prompt, max_tokens, priority=priority, late_inputs=late, leader=leader,
                stop_ids=stop_ids, report_every=every,
            )  # fmt: skip
            asked[rid] = (tuple(prompt), max_tokens, stop_ids)
        elif event[0] == "abort":
            engine.inbox.append(Abort(request_ids=(request_id(1, event[1]),)))
        else:
            for _ in range(event[1]):
                engine.turn()
    engine.run_dry()
    for rid, (prompt, max_tokens, stop_ids) in asked.items():
        expected = oracle(prompt, max_tokens, stop_ids)
        assert len(engine.ends[rid]) == 1
        if engine.ends[rid] == [FinishReason.ABORT]:
            assert engine.tokens[rid] == expected[: len(engine.tokens[rid])]
        else:
            assert engine.tokens[rid] == expected
    engine.assert_empty()


def test_a_window_holds_no_more_than_it_sees():
    engine = Engine(window=6, depth=2)
    engine.submit(PROMPT, max_tokens=50)
    most = [0, 0]
    while not engine.counters.finished:
        engine.turn()
        held = [group.pool.num_held for group in engine.kvs[0].groups]
        most = list(map(max, most, held))
    # Of 4 tokens each: all 60 tokens; the 6 last ones and those in flight.
    assert most == [15, 3]
    engine.run_dry()
    engine.assert_empty()


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_windows_are_never_short_when_prompts_leave_in_the_middle(depth):
    engine = Engine(num_blocks=400, window=6, depth=depth, max_batch_size=1, max_num_tokens=32)
    for turns in range(40):
        rid = engine.submit([turns, *range(200)], max_tokens=2)
        for _ in range(turns % (2 * depth + 3)):
            engine.turn()
        engine.inbox.append(Abort(request_ids=(rid,)))
    engine.run_dry()
    engine.assert_empty()


def test_a_prefix_is_taken_over_where_its_window_is_still_there():
    engine = Engine(window=3)
    engine.submit(PROMPT, max_tokens=1)
    engine.run_dry()
    rid = engine.submit((*PROMPT, 40, 41, 42), max_tokens=4)
    engine.run_dry()
    assert engine.counters.prefix_hit_tokens == 8  # two full blocks, of which it needs the second
    assert engine.tokens[rid] == oracle((*PROMPT, 40, 41, 42), 4)
    kv, prompt = engine.kvs[0], np.array(PROMPT, np.int32)
    assert kv.match((), prompt, 11).groups[1].shared[0] == NO_BLOCK
    pool = kv.groups[1].pool
    taken = [pool.allocate() for _ in range(pool.num_available)]  # others need all its blocks
    assert kv.match((), prompt, 11).num_tokens == 0
    for block in taken:
        pool.drop(block, -1, is_indexed=False)


def test_a_state_is_taken_over_where_a_copy_was_kept():
    engine = Engine(num_blocks=40, num_states=4, depth=2)
    engine.submit(tuple(range(20)), max_tokens=3)
    engine.run_dry()
    # Copies were kept after 8, 12, 16 and all 20 tokens of the prompt.
    for prompt, num_hit in (
        (tuple(range(12)), 8),
        (tuple(range(14)), 12),
        ((*range(20), 30, 31), 20),
        ((*range(19), 30, 31), 16),
        ((7, *range(19)), 0),
    ):
        before = engine.counters.prefix_hit_tokens
        rid = engine.submit(prompt, max_tokens=4)
        engine.run_dry()
        assert engine.tokens[rid] == oracle(prompt, 4)
        assert engine.counters.prefix_hit_tokens - before == num_hit, prompt
    engine.assert_empty()


def test_short_chunks_keep_no_more_copies_of_a_state():
    engine = Engine(num_blocks=40, num_states=9, max_num_tokens=3)
    engine.submit(tuple(range(20)), max_tokens=3)
    engine.run_dry()
    assert engine.kvs[0].groups[1].pool.num_reusable == 4  # after 8, 12, 16 and 20 tokens


def test_the_next_turn_of_a_chat_goes_on_where_the_answer_was_opened():
    engine = Engine(num_blocks=80, num_states=4, max_num_tokens=64, state_interval=64)
    asked, opening = tuple(range(30)), (45, 46, 47, 48, 49)
    engine.submit((*asked, *opening), max_tokens=9)
    engine.run_dry()
    # Its thoughts, which were behind the opening words, are left out of the next turn.
    rid = engine.submit((*asked, 45, 46, 47, 7, 8, 9, *opening), max_tokens=5)
    engine.run_dry()
    assert engine.counters.prefix_hit_tokens == 24  # the last full block of 4 before 35 - 8
    assert engine.tokens[rid] == oracle((*asked, 45, 46, 47, 7, 8, 9, *opening), 5)


def test_running_texts_leave_the_copies_of_states_their_blocks():
    engine = Engine(num_blocks=80, num_states=3, depth=2, max_num_tokens=64, max_seq_len=200)
    pool = engine.kvs[0].groups[1].pool
    kept = tuple(range(20))
    engine.submit(kept, max_tokens=2)
    engine.run_dry()
    assert pool.num_reusable == 4  # one more than are safe, in a block that no text holds
    rids = [engine.submit((n,), max_tokens=12) for n in range(10)]  # 4 rows, kept busy
    num_copies = set()
    while not all(engine.ends[rid] for rid in rids):
        engine.turn()
        num_copies.add(len(engine.kvs[0].groups[1]._place_of))
    assert min(num_copies) == 3
    engine.run_dry()
    for n, rid in enumerate(rids):
        assert engine.tokens[rid] == oracle((n,), 12)
    engine.assert_empty()


def test_the_copy_that_was_of_use_last_outlives_the_others():
    engine = Engine(num_blocks=200, num_states=2, max_batch_size=1, max_num_tokens=64)
    first, *others = [tuple(range(n, n + 20)) for n in range(0, 30, 5)]
    for prompt in (first, *others):
        for _ in range(2):  # the second time from the copy after 16 tokens
            engine.submit(prompt, max_tokens=1)
            engine.run_dry()
        before = engine.counters.prefix_hit_tokens
        engine.submit(prompt, max_tokens=1)
        engine.run_dry()
        assert engine.counters.prefix_hit_tokens - before == 16
    before = engine.counters.prefix_hit_tokens
    engine.submit(first, max_tokens=1)
    engine.run_dry()
    assert engine.counters.prefix_hit_tokens == before  # long gone
    assert len(engine.kvs[0].groups[1]._place_of) <= 3


def test_without_blocks_for_copies_no_prefix_is_taken_over_and_no_chunk_cut():
    engine = Engine(num_blocks=40, num_states=0, max_num_tokens=64)
    for _ in range(2):
        engine.submit(tuple(range(30)), max_tokens=3)
        engine.run_dry()
    assert engine.counters.prefix_hit_tokens == 0 and engine.counters.prefill_chunks == 2


def test_every_block_of_a_text_is_digested_once_for_all_its_copies(monkeypatch):
    digested = []
    original = groups.next_digest
    monkeypatch.setattr(
        groups, "next_digest", lambda parent, tokens: digested.append(1) or original(parent, tokens)
    )
    engine = Engine(num_blocks=100, num_states=99, max_num_tokens=64, max_seq_len=400)
    engine.submit(tuple(range(200)), max_tokens=2)
    engine.run_dry()
    assert len(engine.kvs[0].groups[1]._place_of) == 25  # every 8 tokens; one is also the end
    assert len(digested) == 2 * 50 + 1  # 4 tokens each, by both groups; one to look for it first


def test_results_of_a_life_before_the_preemption_are_dropped_even_when_it_runs_again():
    engine = Engine(num_blocks=40, depth=4)
    rid = engine.submit((1, 2, 3), max_tokens=8)
    engine.turn()
    engine.turn()
    seq = engine.scheduler.running[0]
    assert seq.num_in_flight == 2
    engine.scheduler._preempt(Draft(0, [0]), seq)
    engine.turn()
    assert seq.num_in_flight == 1 and len(engine.loop._steps) == 3
    engine.run_dry()
    assert engine.tokens[rid] == oracle((1, 2, 3), 8)
