"""The scheduler: who starts, who is preempted, what a step holds. On a fake device."""

import pytest
from core_engine import PROMPT, Engine
from fake_executor import oracle

from penstock.config.run import CapacityPolicy, QueuePolicy
from penstock.ipc.messages import Abort, ClientLeft
from penstock.types.request import FinishReason


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
    rid = engine.submit(PROMPT, max_tokens=10, stream_interval=4)
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
    def run(num_host_blocks):
        engine = Engine(
            num_blocks=9,
            depth=depth,
            max_num_tokens=32,
            block_reuse=reuse,
            num_host_blocks=num_host_blocks,
        )
        prompts = [(i, i + 1, i + 2, i + 3) for i in range(3)]
        rids = [engine.submit(p, max_tokens=20) for p in prompts]
        engine.run_dry()
        for rid, prompt in zip(rids, prompts, strict=True):
            assert engine.tokens[rid] == oracle(prompt, 20)
        engine.assert_empty()
        return engine.counters

    without, some, enough = run(0), run(5), run(40)
    assert without.preemptions >= 1 and without.swapped_out_blocks == without.swapped_in_blocks == 0
    assert (
        enough.swapped_out_blocks > 0 and 0 < enough.swapped_in_blocks <= enough.swapped_out_blocks
    )
    assert enough.prompt_tokens == 12 + enough.preemptions  # one token of each that comes back
    assert enough.prompt_tokens < some.prompt_tokens <= without.prompt_tokens


def test_an_abort_gives_back_what_host_memory_keeps():
    engine = Engine(num_blocks=9, max_num_tokens=32, num_host_blocks=40)
    rids = [engine.submit((i, i + 1, i + 2, i + 3), max_tokens=20) for i in range(3)]
    while not engine.counters.swapped_out_blocks:
        engine.turn()
    assert engine.kvs[0].num_free_host_tokens < 40 * 4
    engine.inbox.append(Abort(request_ids=tuple(rids)))
    engine.turn()
    engine.run_dry()
    engine.assert_empty()


def test_after_a_failed_step_nothing_is_taken_from_host_memory():
    engine = Engine(num_blocks=9, max_num_tokens=32, num_host_blocks=40)
    prompts = [(i, i + 1, i + 2, i + 3) for i in range(3)]
    rids = [engine.submit(p, max_tokens=20) for p in prompts]
    while not engine.counters.swapped_out_blocks:
        engine.turn()
    object.__setattr__(engine.device.handles[-1].result, "error", "out of memory")
    engine.run_dry()
    ends = [engine.ends[rid] for rid in rids]
    assert ends.count([FinishReason.ERROR]) == 2 and ends.count([FinishReason.LENGTH]) == 1
    survivor = ends.index([FinishReason.LENGTH])
    assert engine.tokens[rids[survivor]] == oracle(prompts[survivor], 20)
    assert engine.counters.swapped_in_blocks == 0
    engine.assert_empty()


@pytest.mark.parametrize("groups", [{}, {"window": 6}, {"num_states": 2}], ids=str)
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_whichever_step_fails_the_others_get_their_tokens(depth, groups):
    """What it should have swapped out never comes back, what it should have copied is not found."""
    lengths = [(9, 22), (7, 12), (9, 15), (8, 16), (2, 10)]
    prompts = [tuple((i * 7 + j) % 50 for j in range(num)) for i, (num, _) in enumerate(lengths)]
    num_swapped_out, num_swapped_in, num_steps = 0, 0, 1
    failing = -1
    while failing < num_steps:
        engine = Engine(
            num_blocks=13, depth=depth, max_num_tokens=32, max_batch_size=6, num_host_blocks=60,
            **groups,
        )  # fmt: skip
        engine.device.fails = failing.__eq__
        rids = [engine.submit(p, m) for p, (_, m) in zip(prompts, lengths, strict=True)]
        engine.run_dry()
        for rid, prompt, (_, max_tokens) in zip(rids, prompts, lengths, strict=True):
            expected = oracle(prompt, max_tokens)
            if engine.ends[rid] == [FinishReason.ERROR]:
                expected = expected[: len(engine.tokens[rid])]
            assert engine.tokens[rid] == expected
        assert (engine.counters.failed > 0) == (0 <= failing < len(engine.device.plans))
        engine.assert_empty()
        num_swapped_out += engine.counters.swapped_out_blocks
        num_swapped_in += engine.counters.swapped_in_blocks
        num_steps = len(engine.device.plans)
        failing += 1
    assert 0 < num_swapped_in < num_swapped_out


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
