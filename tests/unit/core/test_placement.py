"""Where sequences start among data-parallel ranks, and when prompts wait. On a fake device."""

import pytest
from core_engine import PROMPT, Engine

from penstock.config.run import PromptBalance

LONG = tuple(range(1, 30))


def ranks_of(engine, ids) -> list[int]:
    return [next(s.dp_rank for s in engine.scheduler.running if s.id == rid) for rid in ids]


def test_sequences_spread_and_rows_are_each_ranks_own():
    engine = Engine(num_ranks=2, max_batch_size=2, max_num_tokens=64)
    ids = [engine.submit([i, *PROMPT]) for i in range(5)]
    engine.turn()
    assert sorted(ranks_of(engine, ids[:4])) == [0, 0, 1, 1]  # twice max_batch_size run at once
    engine.run_dry()
    assert len(engine.ends) == 5
    engine.assert_empty()


def test_a_later_turn_goes_where_its_prefix_is_unless_that_rank_is_busy():
    engine = Engine(num_ranks=2, max_batch_size=8, max_num_tokens=256, num_blocks=200)
    engine.submit([40, *PROMPT], max_tokens=2)  # rank 0
    there = engine.submit(LONG, max_tokens=2)  # the less busy one
    engine.turn()
    assert ranks_of(engine, [there]) == [1]
    engine.run_dry()
    again = [engine.submit([*LONG, i], max_tokens=3) for i in range(7)]
    engine.turn()
    # With nothing on rank 0, rank 1 may be ahead by four; the others find no prefix there.
    assert ranks_of(engine, again) == [1, 1, 1, 1, 1, 0, 1]
    engine.run_dry()
    engine.assert_empty()


def test_a_rank_without_blocks_does_not_hold_up_what_another_has_room_for():
    engine = Engine(num_ranks=2, num_blocks=12, max_num_tokens=64)
    first = engine.submit(LONG, max_tokens=12)
    engine.turn()
    # Its prefix is on rank 0, where there is no room for a second one.
    engine.turn()
    second = engine.submit([*LONG, 44, 45, 46, 47, 48, 49, 50, 51, 52], max_tokens=6)
    engine.turn()
    assert ranks_of(engine, [first, second]) == [0, 1]
    engine.run_dry()
    engine.assert_empty()


def decoding(balance, **changes) -> Engine:
    """Each of two ranks decodes, and one prompt waits."""
    engine = Engine(num_ranks=2, max_num_tokens=64, num_blocks=99, balance=balance, **changes)
    for i in range(2):
        engine.submit([40 + i, *PROMPT], max_tokens=40)
    engine.turn()
    engine.turn()
    assert sorted(s.dp_rank for s in engine.scheduler.running if not s.is_prefilling) == [0, 1]
    return engine


def steps_until_started(engine, num_prompts) -> int:
    ids = {engine.submit([50 + i, *PROMPT], max_tokens=30) for i in range(num_prompts)}
    before = len(engine.device.plans)
    for _ in range(200):
        engine.turn()
        if ids & {join.request_id for join in engine.device.plans[-1].joins}:
            return len(engine.device.plans) - before - 1
    raise AssertionError("it never starts")


@pytest.mark.parametrize(
    ("balance", "num_prompts", "num_steps"),
    [
        (None, 1, 0),
        (PromptBalance(batching_wait=5, timeout=3), 1, 3),  # no prompt for the other rank comes
        (PromptBalance(batching_wait=5, timeout=0), 1, 0),
        (PromptBalance(batching_wait=5, timeout=9), 2, 5),  # one each, and more may come
        (PromptBalance(batching_wait=0, timeout=9), 2, 0),
    ],
)
def test_prompts_wait_as_many_steps_as_the_settings_say(balance, num_prompts, num_steps):
    engine = decoding(balance)
    assert steps_until_started(engine, num_prompts) == num_steps
    engine.run_dry()
    engine.assert_empty()


def test_nothing_waits_while_a_rank_has_nothing_to_do():
    balance = PromptBalance(batching_wait=50, timeout=50)
    engine = Engine(num_ranks=2, max_num_tokens=64, num_blocks=99, balance=balance)
    engine.submit([40, *PROMPT], max_tokens=40)
    engine.turn()
    engine.turn()
    assert steps_until_started(engine, 1) == 0
    engine.run_dry()
    engine.assert_empty()
