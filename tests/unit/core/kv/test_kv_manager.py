"""The KV manager over its groups: match, open, grow, index, close; nothing lost in any order."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.kv.groups import NO_BLOCK, FullGroup, StateGroup, WindowGroup
from penstock.core.kv.invariants import check
from penstock.core.kv.manager import BlockCopy, Holder, KVManager, NewBlock
from penstock.core.kv.prefix_index import ExtraKeys
from penstock.types.step import Move

SIZE = 4  # tokens of a block


def text(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


def full(num_blocks: int = 9, partial: bool = False, num_host_blocks: int = 0) -> KVManager:
    return KVManager([FullGroup(num_blocks, SIZE, True, partial)], num_host_blocks)


def opened(kv: KVManager, ids: np.ndarray, extra_keys: ExtraKeys | None = None) -> Holder:
    """A holder of all tokens, as a prompt that was just started."""
    match = kv.match(extra_keys or {}, ids, len(ids) - 1)
    assert kv.fits(match, len(ids), 0)
    holder, _ = kv.open(match, len(ids))
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
    kv.release(0)
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
    second, copies = kv.open(match, 8)
    source, copy = first.tables[0].blocks[1], second.tables[0].blocks[1]
    assert copies == [BlockCopy(0, source, copy, Move.WITHIN)] and source != copy
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
    kv.release(7)
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
    kv.release(0)
    # Nobody holds them now: they are taken out of what is available.
    assert kv.fits(kv.match({}, ids, 11), 12, 1) and not kv.fits(kv.match({}, ids, 11), 12, 2)


def test_texts_that_grow_side_by_side_must_fit_all_together():
    kv = full(num_blocks=9)
    assert kv.could_hold([16, 16]) and not kv.could_hold([16, 17])
    assert kv.num_usable == 8 and kv.num_free_tokens == 32


def test_blocks_move_to_host_memory_and_back():
    kv, ids = full(num_blocks=9, num_host_blocks=3), text(*range(10))
    holder = opened(kv, ids)
    blocks = list(holder.tables[0].blocks)
    kept, out = kv.swap_out(holder, 9, step=4)
    assert kept is not None and kept.num_tokens == 9 and kept.step == 4
    assert out == [
        BlockCopy(0, b, p, Move.SWAP_OUT) for b, p in zip(blocks, kept.host_blocks, strict=True)
    ]
    assert kv.num_free_host_blocks == 0 and kv.num_free_host_tokens == 0
    kv.close(holder, last_step=4)
    kv.release(4)
    check(kv, [], [kept])
    assert kv.swap_out(opened(kv, text(1)), 1, step=5) == (None, [])  # no room for another
    again, back = kv.open(kv.match({}, ids, 9), 10, kept)
    assert back == [
        BlockCopy(0, p, b, Move.SWAP_IN)
        for p, b in zip(kept.host_blocks, again.tables[0].blocks, strict=True)
    ]
    kv.drop_swapped(kept)
    assert kv.num_free_host_blocks == 3


def test_host_memory_is_for_caches_whose_only_group_keeps_all_tokens():
    groups = [FullGroup(9, SIZE, True, True), StateGroup(9, SIZE, 8, 2, True)]
    assert (
        KVManager(groups, 5).num_host_blocks == 0 and KVManager(groups[:1], 5).num_host_blocks == 5
    )


def test_a_prefix_is_as_long_as_all_groups_have_it():
    groups = [FullGroup(40, SIZE, True, True), StateGroup(9, SIZE, 8, 2, True)]
    kv, ids = KVManager(groups), text(*range(20))
    holder = opened(kv, ids)
    copies = []
    for start in (0, 8, 12):  # chunks end where a state is worth a copy
        copies += kv.before_step(holder, ids, start, step=0)
        kv.index(holder, ids, start)
    assert [copy.group for copy in copies] == [1, 1]
    assert kv.chunk_limit(0, 20, 20) == 8
    longer = text(*range(10), 70, 71)
    assert groups[0].match({}, longer, 11).num_tokens == 10
    match = kv.match({}, longer, 11)
    assert match.num_tokens == 8  # after which there is a state
    assert [part.num_tokens for part in match.groups] == [8, 8]
    check(kv, [holder])


KINDS = {
    "full": lambda: [FullGroup(13, SIZE, True, True)],
    "full without reuse": lambda: [FullGroup(13, SIZE, False, False)],
    "window": lambda: [FullGroup(13, SIZE, True, True), WindowGroup(60, SIZE, 5, True, True)],
    "state": lambda: [FullGroup(13, SIZE, True, True), StateGroup(9, SIZE, 8, 5, True)],
}
actions = st.lists(
    st.tuples(
        st.sampled_from(["open", "grow", "compute", "close", "swap", "commit"]),
        st.integers(0, 4),
        st.lists(st.integers(0, 1), min_size=1, max_size=14),
    ),
    max_size=40,
)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(actions=actions)
def test_in_any_order_of_calls_no_block_is_lost_or_held_twice(kind, actions):
    kv = KVManager(KINDS[kind](), num_host_blocks=6)
    holders: dict[int, tuple[Holder, np.ndarray]] = {}
    kept, step = {}, 0
    for action, who, ids in actions:
        holder, tokens = holders.get(who, (None, text(*ids)))
        if action == "open" and holder is None:
            match = kv.match({}, tokens, len(tokens) - 1)
            assert match.num_tokens < len(tokens)
            assert {part.num_tokens for part in match.groups} == {match.num_tokens}
            if kv.fits(match, len(tokens), 0):
                holder, copies = kv.open(match, len(tokens))
                assert all(copy.dst != NO_BLOCK != copy.src for copy in copies)
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
            kv.index(holder, tokens, len(tokens) - 1)
        elif action == "close" and holder is not None:
            kv.close(holder, step)
            del holders[who]
        elif action == "swap" and holder is not None and who not in kept:
            kept[who], _ = kv.swap_out(holder, len(tokens) - 1, step)
            if kept[who] is None:
                del kept[who]
            kv.close(holder, step)
            del holders[who]
        elif action == "swap" and who in kept:
            kv.drop_swapped(kept.pop(who))
        elif action == "commit":
            kv.release(step)
            step += 1
        check(kv, [one for one, _ in holders.values()], kept.values())
    for holder, _ in holders.values():
        kv.close(holder, step)
    kv.release(step)
    assert kv.num_held == 0
    check(kv, [], kept.values())


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
    kv.release(0)
    num_full = (len(ids) - 1) // SIZE
    shared = kv.match(keyed, tokens, num_full * SIZE)
    assert shared.num_tokens == num_full * SIZE
    other = data.draw(st.integers(0, num_full))
    changed = keyed | {other: (*keyed.get(other, ()), "c")}
    found = kv.match(changed, tokens, len(ids) - 1)
    assert found.num_tokens == other * SIZE
    assert found.groups[0].shared == shared.groups[0].shared[:other]
    kv.close(holder, last_step=0)
