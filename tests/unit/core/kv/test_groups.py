"""Cache groups: each by itself, then as a running engine uses them on a fake device."""

import numpy as np
import pytest
from core_engine import PROMPT, Engine
from fake_executor import oracle
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.kv import groups
from penstock.core.kv.groups import NO_BLOCK, FullGroup, StateGroup, WindowGroup
from penstock.ipc.messages import Abort


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
    assert kv.match({}, prompt, 11).groups[1].shared[0] == NO_BLOCK
    pool = kv.groups[1].pool
    taken = [pool.allocate() for _ in range(pool.num_available)]  # others need all its blocks
    assert kv.match({}, prompt, 11).num_tokens == 0
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
        group = engine.kvs[0].groups[1]
        num_copies.add(len(group._key_of) + len(group._unfinished))
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
    assert len(engine.kvs[0].groups[1]._key_of) <= 3


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
        groups, "next_digest", lambda *block: digested.append(1) or original(*block)
    )
    engine = Engine(num_blocks=100, num_states=99, max_num_tokens=64, max_seq_len=400)
    engine.submit(tuple(range(200)), max_tokens=2)
    engine.run_dry()
    assert len(engine.kvs[0].groups[1]._key_of) == 25  # every 8 tokens; one is also the end
    assert len(digested) == 2 * 50 + 1  # 4 tokens each, by both groups; one to look for it first


# The groups by themselves.


def text(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


def computed(group, ids: np.ndarray):
    """A table of a text all of whose tokens are in the cache."""
    table, _ = group.open(group.match({}, ids, len(ids) - 1))
    group.grow(table, len(ids))
    group.index(table, ids, len(ids))
    return table


def test_a_full_group_sets_aside_blocks_for_all_tokens_and_a_window_none():
    full, window = FullGroup(9, 4, True, True), WindowGroup(60, 4, 6, True, True)
    assert [full.most_blocks(n) for n in (1, 4, 5)] == [1, 1, 2]
    assert window.most_blocks(5000) == 0 and StateGroup(9, 4, 8, 2, True).most_blocks(5000) == 1
    match = full.match({}, text(1), 0)
    assert full.has_room(match, 32, 0) and not full.has_room(match, 33, 0)
    assert window.has_room(match, 10**6, 10**6)


def test_the_tail_of_a_text_is_evicted_before_its_beginning():
    group, ids = FullGroup(5, 4, True, False), text(*range(16))
    table = computed(group, ids)
    first, *_, last = table.blocks
    group.close(table, last_step=0)
    group.pool.release(0)
    assert group.pool.allocate() == last
    assert group.match({}, ids, 16).num_tokens == 12
    assert group.match({}, ids, 16).shared[0] == first


def test_where_the_source_of_a_copy_is_the_only_block_left_it_is_taken_itself():
    group, ids = FullGroup(2, 4, True, True), text(1, 2, 3, 4)
    table = computed(group, ids)
    (block,) = table.blocks
    group.close(table, last_step=0)
    group.pool.release(0)
    match = group.match({}, text(1, 2, 9, 9), 3)
    assert (match.num_tokens, match.copy_from) == (2, block)
    again, copies = group.open(match)
    assert again.blocks == [block] and copies == []


@given(window=st.integers(1, 12), lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_a_window_keeps_every_block_that_the_next_token_sees(window, lengths):
    group = WindowGroup(60, 4, window, True, True)
    ids = np.arange(sum(lengths), dtype=np.int32)
    table, _ = group.open(group.match({}, ids, 0))
    for end in np.cumsum(lengths).tolist():
        group.grow(table, end)
        group.index(table, ids, end)
        first_seen = max(0, end - window + 1)  # by the token at `end`, which sees itself too
        needed = range(first_seen // 4, -(-end // 4))
        assert all(table.blocks[i] != NO_BLOCK for i in needed)
        assert table.num_evicted == first_seen // 4
        assert group.pool.num_held == len(table.blocks) - table.num_evicted
    group.close(table, last_step=0)
    group.pool.release(0)
    assert group.pool.num_held == 0


def test_chunks_end_where_a_state_is_worth_a_snapshot():
    group = StateGroup(9, 4, interval=8, max_rows=2, reuse=True)
    # Every 8 tokens, and at the last full block before the 8 tokens that may open the answer.
    assert group.chunk_limit(0, 100, 30) == 8 and group.chunk_limit(3, 100, 30) == 5
    assert group.chunk_limit(16, 100, 30) == 4 and group.chunk_limit(20, 100, 30) == 4
    assert group.chunk_limit(24, 6, 30) == 6 and group.chunk_limit(0, 5, 30) == 5
    assert StateGroup(9, 4, 8, 2, reuse=False).chunk_limit(0, 100, 30) == 100


def test_a_state_that_starts_takes_no_snapshot_of_those_that_are_safe():
    group = StateGroup(4, 4, interval=4, max_rows=1, reuse=True)  # one row, two snapshots
    table, _ = group.open(group.match({}, text(*range(9)), 8))
    for end in (4, 8):
        (copy,) = group.before_step(table, text(*range(9)), end, step=0)
        assert copy.src == table.blocks[0]
        copy.done(True)
    group.pool.release(0)
    assert not group.has_room(group.match({}, text(1), 0), 1, 0)
    group.close(table, last_step=0)
    group.pool.release(0)
    match = group.match({}, text(*range(9)), 8)
    assert group.has_room(match, 9, 0) and match.num_tokens == 8


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("failing", range(5))
def test_a_snapshot_is_found_once_its_step_has_committed(depth, failing):
    """Never one whose copy did not run, or was of a state that a failed step left behind."""
    engine = Engine(num_blocks=60, num_states=6, depth=depth)
    engine.device.fails = lambda step_id: step_id == failing
    prompt = tuple(range(20))  # in chunks of 8, 4, 4 and 4 tokens, then decodes
    engine.submit(prompt, max_tokens=4)
    while not any(engine.ends.values()):
        engine.turn()
        rid = engine.submit((*prompt, 30), max_tokens=2)
    engine.run_dry()
    assert engine.tokens[rid] == oracle((*prompt, 30), 2)
    assert engine.counters.failed >= 1
    engine.assert_empty()


def test_a_window_that_comes_back_indexes_what_it_holds_and_no_more():
    group, ids = WindowGroup(9, 4, 5, True, True), text(*range(20))
    table = computed(group, ids)
    assert table.num_evicted == 4
    elsewhere = group.written(table, 20)
    elsewhere.blocks[4:] = [70]  # of another pool
    group.close(table, last_step=-1)
    others = [group.pool.allocate() for _ in range(8)]  # nothing is found any more
    for block in others:
        group.pool.drop(block, None, is_indexed=False)
    again, (copy,) = group.reopen(group.match({}, ids, 19), elsewhere)
    assert again.blocks == [*[NO_BLOCK] * 4, copy.dst] and copy.src == 70
    group.index(again, ids, 20)
    assert group._index.find(again.digests[5], ids[16:]) == copy.dst
    assert len(group._index) == 1 and NO_BLOCK not in group._index


def test_a_snapshot_within_a_block_is_found_under_the_keys_of_that_block_alone():
    group, ids = StateGroup(9, 4, interval=4, max_rows=2, reuse=True), text(*range(6))
    table, _ = group.open(group.match({1: ("image",)}, ids, 0))
    for end in (4, 6):
        (copy,) = group.before_step(table, ids, end, step=0)
        copy.done(True)
    found = [group.match(keys, ids, 6).num_tokens for keys in ({1: ("image",)}, {1: ("b",)}, {})]
    assert found == [6, 4, 4]
    assert group.match({0: ("image",)}, ids, 6).num_tokens == 0
