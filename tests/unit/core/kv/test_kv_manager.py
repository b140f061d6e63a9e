"""The KV manager over its groups: match, open, grow, index, close; nothing lost in any order."""

import numpy as np
import pytest
from core_engine import Engine
from fake_executor import oracle
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.kv.groups import NO_BLOCK, FullGroup, StateGroup, WindowGroup
from penstock.core.kv.invariants import check
from penstock.core.kv.manager import Holder, KVManager, NewBlock
from penstock.core.kv.prefix_index import ExtraKeys
from penstock.ipc.messages import Abort
from penstock.types.step import CopyBlock, SwapIn, SwapOut

SIZE = 4  # tokens of a block


def text(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


def full(num_blocks: int = 9, partial: bool = False, num_host_blocks: int = 0) -> KVManager:
    return KVManager([FullGroup(num_blocks, SIZE, True, partial)], [num_host_blocks])


def opened(kv: KVManager, ids: np.ndarray, extra_keys: ExtraKeys | None = None) -> Holder:
    """A holder of all tokens, as a prompt that was just started."""
    match = kv.match(extra_keys or {}, ids, len(ids) - 1)
    assert kv.fits(match, len(ids), 0)
    holder = kv.open(match, len(ids))
    assert kv.grow(holder, len(ids))
    return holder


def test_a_match_ends_before_the_last_full_block_of_the_limit():
    kv, ids = full(), text(*range(12))
    holder = opened(kv, ids)
    kv.index(holder, ids, 12)
    assert [kv.match({}, ids, limit).num_tokens for limit in (0, 3, 4, 11, 12)] == [0, 0, 4, 8, 12]
    assert kv.match({0: ("other",)}, ids, 12).num_tokens == 0
    check(kv, [holder])


def test_what_is_not_computed_yet_is_not_found():
    kv, ids = full(), text(*range(12))
    holder = opened(kv, ids)
    kv.index(holder, ids, 7)  # one full block, part of another
    assert kv.match({}, ids, 12).num_tokens == 4


def test_shared_blocks_are_counted_once():
    kv, ids = full(), text(*range(12))
    first = opened(kv, ids)
    kv.index(first, ids, 12)
    second = opened(kv, ids)
    assert kv.num_held == 3 + 1  # two shared; one token is always computed, in a block of its own
    assert second.tables[0].blocks[:2] == first.tables[0].blocks[:2]
    check(kv, [first, second])
    kv.close(first, last_step=0)
    kv.commit(0)
    assert kv.num_held == 3 and kv.num_reusable == 1
    check(kv, [second])


def test_the_device_is_told_of_each_new_block_once():
    kv = full()
    holder = opened(kv, text(*range(6)))
    blocks = holder.tables[0].blocks
    assert holder.unsent() == [NewBlock(0, 0, blocks[0]), NewBlock(0, 1, blocks[1])]
    assert holder.unsent() == []
    assert kv.grow(holder, 9)
    assert holder.unsent() == [NewBlock(0, 2, holder.tables[0].blocks[2])]


def test_a_part_of_a_block_is_copied_for_its_new_holder():
    kv, ids = full(partial=True), text(*range(8))
    first = opened(kv, ids)
    kv.index(first, ids, 8)
    other = text(0, 1, 2, 3, 4, 5, 99, 99)
    match = kv.match({}, other, 7)
    assert match.num_tokens == 6
    second = kv.open(match, 8)
    source, copy = first.tables[0].blocks[1], second.tables[0].blocks[1]
    assert kv.take_ops() == [CopyBlock(dp_rank=0, group=0, src=source, dst=copy)]
    assert source != copy and kv.take_ops() == []
    check(kv, [first, second])


def test_growing_takes_all_blocks_or_none():
    kv = full(num_blocks=5)
    one, other = opened(kv, text(1, 2)), opened(kv, text(3, 4))
    assert not kv.grow(one, 4 * SIZE) and len(one.tables[0].blocks) == 1
    assert kv.needs_blocks(one, 5) and not kv.needs_blocks(one, 4)
    assert kv.shortfall(one, 4 * SIZE) == 1
    kv.close(other, last_step=7)
    assert kv.shortfall(one, 4 * SIZE) == 0  # they only wait for a step
    assert not kv.grow(one, 4 * SIZE)
    kv.commit(7)
    assert kv.grow(one, 4 * SIZE) and kv.num_free_tokens == 0
    check(kv, [one])


def test_spare_blocks_are_left_to_those_who_run():
    kv = full(num_blocks=9)
    match = kv.match({}, text(*range(20)), 19)
    assert kv.fits(match, 20, num_spare=3) and not kv.fits(match, 20, num_spare=4)
    assert kv.fits(match, 20, 0, spare_share=0.25) and not kv.fits(match, 20, 0, spare_share=0.5)


def test_blocks_of_a_running_holder_cost_a_second_one_nothing():
    kv, ids = full(num_blocks=5), text(*range(12))
    holder = opened(kv, ids)
    kv.index(holder, ids, 12)
    again = kv.match({}, ids, 11)
    assert kv.fits(again, 12, 0) and not kv.fits(again, 12, 1)
    kv.close(holder, last_step=0)
    kv.commit(0)
    # Nobody holds them now: they are taken out of what is available.
    assert kv.fits(kv.match({}, ids, 11), 12, 1) and not kv.fits(kv.match({}, ids, 11), 12, 2)


def test_texts_that_grow_side_by_side_must_fit_all_together():
    kv = full(num_blocks=9)
    assert kv.could_hold([16, 16]) and not kv.could_hold([16, 17])
    assert kv.num_usable == 8 and kv.num_free_tokens == 32


OWNER = 77


def moved(kind: type, pairs, group: int = 0) -> list:
    return [kind(dp_rank=0, group=group, src=src, dst=dst) for src, dst in pairs]


def test_blocks_move_to_host_memory_and_back():
    kv, ids = full(num_blocks=9, num_host_blocks=3), text(*range(10))
    holder = opened(kv, ids)
    blocks = list(holder.tables[0].blocks)
    assert kv.can_swap_out(holder, 9)
    kv.swap_out(OWNER, holder, 9, step=4)
    out = kv.take_ops()
    host_blocks = [op.dst for op in out]
    assert out == moved(SwapOut, zip(blocks, host_blocks, strict=True))
    assert kv.num_free_host_tokens == 0 and kv.num_swapped_out == 3
    kv.close(holder, last_step=3)
    check(kv, [])
    other = opened(kv, text(1))
    assert not kv.can_swap_out(other, 1)
    kv.swap_out(78, other, 1, step=5)  # no room for another
    assert not kv.is_swapped_out(78) and kv.take_ops() == []
    kv.commit(4)
    match = kv.match({}, ids, 9, OWNER)
    assert match.num_tokens == 0 and match.num_computed == 9
    again = kv.open(match, 10)
    assert kv.take_ops() == moved(SwapIn, zip(host_blocks, again.tables[0].blocks, strict=True))
    kv.drop_swapped(OWNER)
    assert kv.num_free_host_tokens == 12 and kv.match({}, ids, 9, OWNER).num_computed == 0
    kv.index(again, ids, 9)
    assert kv.match({}, ids, 9).num_tokens == 8  # found by others now
    check(kv, [again, other])


def test_what_is_found_in_the_cache_does_not_come_from_host_memory():
    kv, ids = full(num_blocks=9, num_host_blocks=3), text(*range(10))
    holder = opened(kv, ids)
    kv.index(holder, ids, 8)
    first, second, _ = holder.tables[0].blocks
    kv.swap_out(OWNER, holder, 9, step=0)
    host_blocks = [op.dst for op in kv.take_ops()]
    kv.close(holder, last_step=-1)
    kv.commit(0)
    again = kv.open(kv.match({}, ids, 9, OWNER), 10)
    assert again.tables[0].blocks[:2] == [first, second]
    assert kv.take_ops() == moved(SwapIn, [(host_blocks[2], again.tables[0].blocks[2])])
    kv.index(again, ids, 9)
    check(kv, [again])


@pytest.mark.parametrize("failed", [False, True])
def test_nothing_comes_back_before_it_is_known_that_it_went(failed):
    kv, ids = full(num_host_blocks=3), text(*range(10))
    holder = opened(kv, ids)
    kv.swap_out(OWNER, holder, 9, step=4)
    kv.close(holder, last_step=-1)
    assert not kv.is_swapping_out(OWNER, step=4)  # by the same step it may come back
    assert kv.is_swapping_out(OWNER, step=5)
    kv.commit(3)
    assert kv.is_swapping_out(OWNER, step=5)
    kv.commit(4, failed)
    assert not kv.is_swapping_out(OWNER, step=5) and kv.is_swapped_out(OWNER) != failed
    check(kv, [])


def test_of_a_window_what_it_sees_moves_and_of_a_state_the_state():
    groups = [
        FullGroup(40, SIZE, False, False),
        WindowGroup(40, SIZE, 5, False, False),
        StateGroup(9, SIZE, 8, 2, False),
    ]
    kv, ids = KVManager(groups, [9, 2, 1]), text(*range(20))
    holder = opened(kv, ids)
    kv.index(holder, ids, 19)
    assert holder.tables[1].num_evicted == 3
    kv.swap_out(OWNER, holder, 19, step=0)
    out = kv.take_ops()
    assert [op.group for op in out] == [0] * 5 + [1] * 2 + [2]
    held = [block for table in holder.tables for block in table.blocks[table.num_evicted :]]
    assert [op.src for op in out] == held and NO_BLOCK not in held
    kv.close(holder, last_step=-1)
    kv.commit(0)
    again = kv.open(kv.match({}, ids, 19, OWNER), 20)
    assert again.tables[1].blocks[:3] == [NO_BLOCK] * 3 and again.tables[1].num_evicted == 3
    back = kv.take_ops()
    assert [op.src for op in back] == [op.dst for op in out]
    now = [block for table in again.tables for block in table.blocks[table.num_evicted :]]
    assert [op.dst for op in back] == now
    kv.drop_swapped(OWNER)
    check(kv, [again])


def test_a_prefix_is_as_long_as_all_groups_have_it():
    groups = [FullGroup(40, SIZE, True, True), StateGroup(9, SIZE, 8, 2, True)]
    kv, ids = KVManager(groups), text(*range(20))
    holder = opened(kv, ids)
    for start in (0, 8, 12):  # chunks end where a state is worth a copy
        kv.before_step(holder, ids, start, step=0)
        kv.index(holder, ids, start)
    assert [op.group for op in kv.take_ops()] == [1, 1]
    check(kv, [holder])
    assert kv.match({}, ids, 19).num_tokens == 0  # no copy is known to have been made
    kv.commit(0)
    assert kv.chunk_limit(0, 20, 20) == 8
    longer = text(*range(10), 70, 71)
    assert groups[0].match({}, longer, 11).num_tokens == 10
    match = kv.match({}, longer, 11)
    assert match.num_tokens == 8  # after which there is a state
    assert [part.num_tokens for part in match.groups] == [8, 8]
    check(kv, [holder])


@pytest.mark.parametrize("groups", [{}, {"num_states": 2}], ids=str)
@pytest.mark.parametrize("depth", [1, 2])
def test_what_is_pinned_outlives_its_request_while_others_come_and_go(depth, groups):
    """As a transfer would that takes longer than any step."""
    engine = Engine(num_blocks=24, depth=depth, max_num_tokens=32, **groups)
    (kv,), slots = engine.kvs, engine.device.slots[0]
    rid = engine.submit(range(10), max_tokens=9)
    while not engine.tokens[rid]:
        engine.turn()
    pin = kv.pin(engine.scheduler.running[0].holder)
    engine.inbox.append(Abort(request_ids=(rid,)))
    engine.turn()
    while engine.loop._steps:
        engine.turn()
    assert kv.num_held == len(pin) > 0 and not engine.scheduler.has_work
    contents = {key: text for key, text in slots.items() if key[:2] in pin}
    others = [engine.submit((i, *range(20, 30)), max_tokens=9) for i in range(12)]
    engine.run_dry()
    for i, other in enumerate(others):
        assert engine.tokens[other] == oracle((i, *range(20, 30)), 9)
    assert {key: text for key, text in slots.items() if key[:2] in pin} == contents
    kv.unpin(pin)
    engine.check()
    engine.assert_empty()


def test_a_request_that_waits_for_pinned_blocks_starts_when_they_are_given_back():
    engine = Engine(num_blocks=9, depth=2, max_num_tokens=32)
    (kv,) = engine.kvs
    gone = engine.submit(range(24), max_tokens=9)
    while not engine.tokens[gone]:
        engine.turn()
    pin = kv.pin(engine.scheduler.running[0].holder)
    engine.inbox.append(Abort(request_ids=(gone,)))
    rid = engine.submit(range(30, 40), max_tokens=9)
    for _ in range(20):
        engine.turn()
    assert not engine.loop._steps and not engine.tokens[rid]  # an idle loop, and nothing fails
    kv.unpin(pin)
    engine.run_dry()
    assert engine.tokens[rid] == oracle(tuple(range(30, 40)), 9)
    engine.assert_empty()


KINDS = {
    "full": lambda: [FullGroup(13, SIZE, True, True)],
    "full without reuse": lambda: [FullGroup(13, SIZE, False, False)],
    "window": lambda: [FullGroup(13, SIZE, True, True), WindowGroup(60, SIZE, 5, True, True)],
    "state": lambda: [FullGroup(13, SIZE, True, True), StateGroup(9, SIZE, 8, 5, True)],
}
actions = st.lists(
    st.tuples(
        st.sampled_from(["open", "grow", "compute", "close", "swap", "commit", "fail"]),
        st.integers(0, 4),
        st.lists(st.integers(0, 1), min_size=1, max_size=14),
    ),
    max_size=40,
)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(actions=actions)
def test_in_any_order_of_calls_no_block_is_lost_or_held_twice(kind, actions):
    groups = KINDS[kind]()
    kv = KVManager(groups, [6] * len(groups))
    holders: dict[int, tuple[Holder, np.ndarray]] = {}
    step = 0
    for action, who, ids in actions:
        holder, tokens = holders.get(who, (None, text(*ids)))
        if action == "open" and holder is None:
            match = kv.match({}, tokens, len(tokens) - 1, who)
            if match.swapped is not None and match.num_computed >= len(tokens):
                continue  # another text
            assert match.num_computed < len(tokens)
            assert {part.num_tokens for part in match.groups} == {match.num_tokens}
            if kv.fits(match, len(tokens), 0):
                holder = kv.open(match, len(tokens))
                kv.drop_swapped(who)
                assert all(
                    op.dst != NO_BLOCK for op in kv.take_ops() if not isinstance(op, SwapOut)
                )
                if kv.grow(holder, len(tokens)):
                    holders[who] = holder, tokens
                else:
                    kv.close(holder, step)
        elif action == "grow" and holder is not None:
            tokens = np.concatenate([tokens, text(*ids)])
            free = [group.pool.num_available for group in kv.groups]
            if kv.grow(holder, len(tokens)):
                holders[who] = holder, tokens
            else:
                assert free == [group.pool.num_available for group in kv.groups]
        elif action == "compute" and holder is not None:
            kv.before_step(holder, tokens, len(tokens) - 1, step)
            kv.index(holder, tokens, len(tokens) - 1)
        elif action == "close" and holder is not None:
            kv.close(holder, step)
            del holders[who]
        elif action == "swap" and holder is not None:
            kv.index(holder, tokens, len(tokens) - 1)
            kv.swap_out(who, holder, len(tokens) - 1, step)
            kv.close(holder, step)
            del holders[who]
        elif action == "swap":
            kv.drop_swapped(who)
        elif action in ("commit", "fail"):
            kv.commit(step, failed=action == "fail")
            step += 1
        check(kv, [one for one, _ in holders.values()])
    for holder, _ in holders.values():
        kv.close(holder, step)
    kv.commit(step)
    assert kv.num_held == 0
    check(kv, [])


GROUPS_OF_KEYS = {
    "full": lambda: [FullGroup(60, SIZE, True, True)],
    "window": lambda: [FullGroup(60, SIZE, True, True), WindowGroup(60, SIZE, 5, True, True)],
    "state": lambda: [FullGroup(60, SIZE, True, True), StateGroup(60, SIZE, SIZE, 5, True)],
}


@pytest.mark.parametrize("kind", GROUPS_OF_KEYS)
@settings(max_examples=60, deadline=None)
@given(
    ids=st.lists(st.integers(0, 1), min_size=1, max_size=30),
    keyed=st.dictionaries(st.integers(0, 7), st.sampled_from([("a",), ("b",), ("a", "b")])),
    data=st.data(),
)
def test_sequences_that_differ_in_one_extra_key_share_the_blocks_before_it(kind, ids, keyed, data):
    """And those that differ in none share all blocks."""
    kv, tokens = KVManager(GROUPS_OF_KEYS[kind]()), text(*ids)
    holder = opened(kv, tokens, keyed)
    for start in range(0, len(ids), SIZE):  # a state is worth a snapshot after each block
        kv.before_step(holder, tokens, start, step=0)
        kv.index(holder, tokens, start)
    kv.index(holder, tokens, len(ids))
    kv.commit(0)
    num_full = (len(ids) - 1) // SIZE
    shared = kv.match(keyed, tokens, num_full * SIZE)
    assert shared.num_tokens == num_full * SIZE
    other = data.draw(st.integers(0, num_full))
    changed = keyed | {other: (*keyed.get(other, ()), "c")}
    found = kv.match(changed, tokens, len(ids) - 1)
    assert found.num_tokens == other * SIZE
    assert found.groups[0].shared == shared.groups[0].shared[:other]
    kv.close(holder, last_step=0)
