"""The host tier: room in host memory, then as a running engine uses it on a fake device."""

import pytest
from core_engine import Engine
from fake_executor import oracle
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.kv.groups import NO_BLOCK, GroupTable
from penstock.core.kv.host_tier import HostTier
from penstock.ipc.messages import Abort
from penstock.types.request import FinishReason


def table(*blocks: int) -> GroupTable:
    return GroupTable([], {}, list(blocks), blocks.count(NO_BLOCK))


def test_a_sequence_goes_as_a_whole_or_not_at_all():
    tier = HostTier([3, 2])
    assert tier.has_room([table(5, 6, 7), table(NO_BLOCK, 8, 9)])
    assert not tier.has_room([table(5, 6, 7), table(1, 8, 9)])
    assert not tier.has_room([table(4, 5, 6, 7), table(NO_BLOCK, 8, 9)])
    swapped = tier.put(1, 12, [table(5, 6), table(NO_BLOCK, 8)], step=0)
    assert tier.num_free_blocks == (1, 1) and tier.get(1) is swapped
    assert swapped.tables[1].blocks[0] == NO_BLOCK  # nothing of it moves
    assert tier.has_room([table(4), table(8)]) and not tier.has_room([table(4, 5), table(8)])
    tier.drop(1)
    tier.drop(1)  # nothing is left of it
    assert tier.num_free_blocks == (3, 2) and tier.get(1) is None


def test_without_host_memory_there_is_room_for_nothing():
    assert not HostTier([]).has_room([table()])
    assert not HostTier([0, 0]).has_room([table(1), table(1)])


GROUPS = {"full": {}, "window": {"window": 6}, "state": {"num_states": 2}}


@pytest.mark.parametrize("kind", GROUPS)
@settings(max_examples=60, deadline=None)
@given(
    asked=st.lists(
        st.tuples(
            st.lists(st.integers(0, 1), min_size=1, max_size=9),
            st.integers(8, 20),
            st.integers(0, 4),  # turns before the next one
            st.sampled_from([None, None, None, 3, 15]),  # turns before it is aborted
        ),
        min_size=3,
        max_size=8,
    ),
    depth=st.sampled_from([1, 2, 4]),
    num_host_blocks=st.sampled_from([4, 9, 40]),
    num_ranks=st.sampled_from([1, 1, 2]),
    reuse=st.booleans(),
    failing=st.sets(st.integers(0, 60), max_size=3),
)
def test_any_traffic_gets_the_tokens_of_an_undisturbed_run(
    kind, asked, depth, num_host_blocks, num_ranks, reuse, failing
):
    engine = Engine(
        num_blocks=10, num_ranks=num_ranks, depth=depth, max_num_tokens=32, max_batch_size=5,
        block_reuse=reuse, partial_reuse=reuse, num_host_blocks=num_host_blocks, **GROUPS[kind],
    )  # fmt: skip
    engine.device.fails = failing.__contains__
    rids, aborts, now = [], [], 0
    for prompt, max_tokens, pause, leaves_after in asked:
        rids.append(engine.submit(prompt, max_tokens))
        if leaves_after is not None:
            aborts.append((now + leaves_after, rids[-1]))
        for _ in range(pause):
            engine.turn()
            now += 1
    for turn, rid in sorted(aborts):
        for _ in range(turn - now):
            engine.turn()
        now = max(now, turn)
        engine.inbox.append(Abort(request_ids=(rid,)))
    engine.run_dry()
    for rid, (prompt, max_tokens, *_) in zip(rids, asked, strict=True):
        expected = oracle(tuple(prompt), max_tokens)
        (end,) = engine.ends[rid]
        num_told = len(engine.tokens[rid]) if end is not FinishReason.LENGTH else max_tokens
        assert engine.tokens[rid] == expected[:num_told]
    engine.assert_empty()


@pytest.mark.parametrize("kind", GROUPS)
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_steps_in_flight_of_a_sequence_that_leaves_are_not_in_vain(kind, depth):
    """What they bring is kept, so every token is computed once."""
    engine = Engine(
        num_blocks=9, depth=depth, max_num_tokens=32, num_host_blocks=40, block_reuse=False,
        **GROUPS[kind],
    )  # fmt: skip
    prompts = [(i, i + 1, i + 2, i + 3) for i in range(3)]
    rids = [engine.submit(prompt, max_tokens=20) for prompt in prompts]
    engine.run_dry()
    assert [engine.tokens[rid] for rid in rids] == [oracle(prompt, 20) for prompt in prompts]
    counters = engine.counters
    assert counters.preemptions >= 1 and counters.swapped_in_blocks > 0
    assert counters.swapped_in_blocks == counters.swapped_out_blocks
    num_computed = sum(int(plan.num_tokens.sum()) for plan in engine.device.plans)
    assert num_computed == 3 * (4 + 20 - 1)


def test_a_tenant_gets_its_row_when_the_steps_of_another_have_committed():
    engine = Engine(num_blocks=60, depth=2, max_batch_size=2, num_host_blocks=40)
    greedy = [engine.submit((i, i + 1), max_tokens=30, tenant=1) for i in range(3)]
    for _ in range(8):
        engine.turn()
    rid = engine.submit((40, 41), max_tokens=2, tenant=2)
    while not engine.ends[rid]:
        engine.turn()
    assert not any(engine.ends[other] for other in greedy)
    assert engine.tokens[rid] == oracle((40, 41), 2)
    assert engine.counters.preemptions == 1 and engine.counters.swapped_out_blocks > 0
    engine.run_dry()
    for i, other in enumerate(greedy):
        assert engine.tokens[other] == oracle((i, i + 1), 30)
    engine.assert_empty()
