"""The engine loop: any traffic, any depth, the right tokens, one end each. On a fake device."""

import itertools
from dataclasses import replace

import pytest
from core_engine import PROMPT, Engine
from fake_executor import MAX_DRAFTS, next_token, oracle
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config.run import CapacityPolicy
from penstock.core.plan_builder import PlanBuilder
from penstock.ipc.messages import Abort
from penstock.types.request import FinishReason, request_id
from penstock.types.sampling import SamplingParams


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


@pytest.mark.parametrize("depth", [1, 2])
def test_an_engine_that_comes_to_rest_says_at_once_that_nothing_runs(depth):
    engine, said = Engine(depth=depth), []
    engine.loop._clock = lambda: 1000.0  # no time passes, so no report is due
    engine.broadcast = said.append
    engine.submit(PROMPT, max_tokens=9)
    engine.turn()
    engine.run_dry()
    assert len(said) == 1 and said[0].counters.running == 1
    for _ in range(3):
        engine.turn()
    assert len(said) == 2 and said[1].counters.running == 0
    assert len(said[1].iterations) > 1


def test_a_stop_id_ends_the_request_and_late_tokens_are_dropped():
    expected = oracle(PROMPT, 20)
    engine = Engine(depth=4)
    rid = engine.submit(PROMPT, max_tokens=20, stop_ids=(expected[3],))
    engine.run_dry()
    assert engine.tokens[rid] == expected[:4]
    assert engine.ends[rid] == [FinishReason.STOP]
    engine.assert_empty()


def test_late_inputs_hold_sampling_back_until_the_step_before_has_committed():
    engine = Engine(depth=4)
    rid = engine.submit(PROMPT, max_tokens=8, late_inputs=True)
    engine.run_dry()
    assert engine.device.num_late > 5
    assert engine.tokens[rid] == oracle(PROMPT, 8)


def watched(engine) -> list[str]:
    """What the loop does from now on, in order."""
    done: list[str] = []

    def watch(owner, name):
        call = getattr(owner, name)

        def watching(*args):
            done.append(name)
            return call(*args)

        setattr(owner, name, watching)

    watch(engine.device, "forward")
    watch(engine.device, "sample")
    watch(engine, "send")
    return done


def test_behind_late_inputs_the_next_step_is_launched_before_anything_is_told():
    engine = Engine(depth=2)
    rid = engine.submit(PROMPT[:4], max_tokens=8, late_inputs=True)
    for _ in range(2):
        engine.turn()  # two steps are in flight, the second is not sampled yet
    done = watched(engine)
    engine.turn()
    assert done == ["sample", "forward", "send"]
    engine.run_dry()
    assert engine.tokens[rid] == oracle(PROMPT[:4], 8)


def test_a_request_that_came_meanwhile_is_in_the_step_behind_late_inputs():
    engine = Engine(depth=2)
    engine.submit(PROMPT[:4], max_tokens=8, late_inputs=True)
    for _ in range(2):
        engine.turn()
    wait = engine.device.handles[0].wait

    def waiting():
        engine.submit(PROMPT[:3], max_tokens=2)
        return wait()

    engine.device.handles[0].wait = waiting
    engine.turn()
    assert engine.device.plans[-1].num_entries == 2


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


@pytest.mark.parametrize("depth", [1, 2])
def test_an_entry_that_fails_ends_its_request_and_no_other(monkeypatch, depth):
    engine = Engine(depth=depth)
    sample, bad_step = engine.device.sample, itertools.count()
    prompts = {engine.submit(prompt): prompt for prompt in ((1, 2, 3), (4, 5), (6, 7, 8))}
    unlucky = list(prompts)[1]

    def failing(step_id, late):
        handle = sample(step_id, late)
        if next(bad_step) == 2:
            handle.result = replace(handle.result, failures={1: "its logits"})
        return handle

    monkeypatch.setattr(engine.device, "sample", failing)
    engine.run_dry()
    assert engine.ends[unlucky] == [FinishReason.ERROR] and engine.counters.failed == 1
    for rid in set(prompts) - {unlucky}:
        assert engine.tokens[rid] == oracle(prompts[rid], 6)
        assert engine.ends[rid] == [FinishReason.LENGTH]
    engine.assert_empty()


def some_drafts(text):
    """None, one or more, and of them none, some or all are right."""
    number = next_token((-1, *text))
    num_drafts = number % (MAX_DRAFTS + 1)
    return num_drafts, number // 7 % (num_drafts + 1)


class Foreseeing:
    """A follower that knows what comes next: after some texts a few tokens, else none."""

    def __init__(self):
        self.texts = {}

    def on_commit(self, request, token_ids):
        self.texts[request.id] = (*self.texts.get(request.id, request.prompt_ids), *token_ids)

    def known_tokens(self, request):
        return self.following(tuple(int(one) for one in self.texts[request.id]))

    def following(self, text):
        return oracle(text, max(0, next_token((-2, *text)) % 12 - 4))

    def on_close(self, request):
        self.texts.pop(request.id, None)


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("num_states", [None, 3])
def test_tokens_that_must_come_are_not_drawn(depth, num_states):
    engine = Engine(depth=depth, num_states=num_states, num_blocks=60)
    engine.scheduler.add_follower(Foreseeing())
    known, drawn = (
        engine.submit(PROMPT, max_tokens=40, late_inputs=late) for late in (True, False)
    )
    engine.run_dry()
    assert engine.tokens[known] == engine.tokens[drawn] == oracle(PROMPT, 40)
    assert engine.counters.generated_tokens == 80
    assert engine.counters.known_tokens > 10
    engine.assert_empty()


def test_a_request_with_processors_that_see_each_token_is_not_drafted_for():
    engine = Engine(drafts=lambda text: (2, 2))
    for processors in ({}, {"its_name": {}}):
        drafted = engine.counters.drafted_tokens
        sampling = SamplingParams(logits_processors=processors)
        engine.submit(PROMPT, max_tokens=9, sampling=sampling, late_inputs=True)
        engine.run_dry()
        assert (engine.counters.drafted_tokens > drafted) == (not processors)


@pytest.mark.parametrize("num_states", [None, 3])
def test_a_step_in_flight_keeps_no_draft_where_its_tokens_are_known_by_then(num_states):
    """The draft is the token that is allowed behind those that are known."""
    engine, foreseeing = Engine(depth=2, num_states=num_states, drafts=some_drafts), Foreseeing()
    engine.scheduler.add_follower(foreseeing)

    def draft(plan, i, row):
        text = tuple(row.text)
        return [next_token((*text, *foreseeing.following(text)))]

    engine.device._draft = draft
    rid = engine.submit(PROMPT, max_tokens=40, late_inputs=True)
    engine.run_dry()
    assert engine.tokens[rid] == oracle(PROMPT, 40)
    assert engine.counters.known_tokens > 10 and engine.counters.drafted_tokens > 3
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
            st.integers(0, 2),
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
    drafting=st.booleans(),
    num_blocks=st.integers(15, 30),
    chunked=st.booleans(),
    partial=st.booleans(),
    policy=st.sampled_from(CapacityPolicy),
    window=st.sampled_from([None, None, 1, 3, 6, 9]),
    num_states=st.sampled_from([None, None, 0, 1, 3, 20]),
    num_host_blocks=st.sampled_from([0, 3, 100]),
    reuse=st.booleans(),
    failing=st.sets(st.integers(0, 60), max_size=6),
)
def test_any_traffic_gives_every_request_its_tokens_and_one_end(
    events, depth, num_ranks, drafting, num_blocks, chunked, partial, policy, window,
    num_states, num_host_blocks, reuse, failing,
):  # fmt: skip
    engine = Engine(
        num_blocks=num_blocks, num_ranks=num_ranks, drafts=some_drafts if drafting else None,
        depth=depth, chunked_prefill=chunked,
        max_num_tokens=20 if not chunked else 7, block_reuse=reuse,
        partial_reuse=reuse and partial, capacity_policy=policy, window=window,
        num_states=num_states, num_host_blocks=num_host_blocks,
    )  # fmt: skip
    engine.device.fails = failing.__contains__
    engine.scheduler.add_follower(Foreseeing())
    asked: dict[int, tuple] = {}
    for event in events:
        if event[0] == "submit":
            _, prompt, max_tokens, priority, late, follows, every, tenant = event
            leader = next(reversed(asked), None) if follows else None
            stop_ids = (oracle(tuple(prompt), 12)[-1],)
            rid = engine.submit(
                prompt, max_tokens, priority=priority, late_inputs=late, leader=leader,
                stop_ids=stop_ids, stream_interval=every, tenant=tenant, weight=1.0 + tenant,
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
        if engine.ends[rid] in ([FinishReason.ABORT], [FinishReason.ERROR]):
            assert engine.tokens[rid] == expected[: len(engine.tokens[rid])]
        else:
            assert engine.tokens[rid] == expected
    num_failed_steps = sum(step_id < len(engine.device.plans) for step_id in failing)
    assert num_failed_steps or not engine.counters.failed
    engine.assert_empty()


def test_results_of_a_life_before_the_preemption_are_dropped_even_when_it_runs_again():
    engine = Engine(num_blocks=40, depth=4)
    rid = engine.submit((1, 2, 3), max_tokens=8)
    engine.turn()
    engine.turn()
    seq = engine.scheduler.running[0]
    assert seq.num_in_flight == 2
    engine.scheduler._preempt(PlanBuilder(0, [0]), seq)
    engine.turn()
    assert seq.num_in_flight == 1 and len(engine.loop._steps) == 3
    engine.run_dry()
    assert engine.tokens[rid] == oracle((1, 2, 3), 8)


def test_work_that_can_wait_is_done_when_nothing_came_for_a_while_and_once_a_wait():
    engine = Engine()
    done = []
    engine.loop._when_idle = lambda: bool(done.append(engine.scheduler.has_work))
    for _ in range(3):
        engine.loop.turn()
    assert done == [False, False]  # not in the first turn, which has not waited yet
    engine.submit(PROMPT)
    engine.run_dry()
    assert done == [False, False]  # neither while something runs nor in the turn that ends it
    engine.loop.turn()
    engine.loop.turn()
    assert done == [False] * 3


def test_work_that_can_wait_goes_on_at_once_until_something_comes():
    engine, waits = Engine(), []
    receive = engine.receive
    engine.receive = lambda timeout_ms: waits.append(timeout_ms) or receive(timeout_ms)
    done = []
    engine.loop._when_idle = lambda: len(done) < 5 and (done.append(None) or True)
    for _ in range(4):
        engine.loop.turn()
    assert waits == [0, 100, 0, 0] and len(done) == 3
    engine.submit(PROMPT)
    engine.run_dry()
    assert len(done) == 3
    waits.clear()
    for _ in range(5):
        engine.loop.turn()
    assert waits == [0, 100, 0, 0, 100] and len(done) == 5
