"""The block pool: every block is held, quarantined, reusable or blank, and never two of these."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from hypothesis.strategies import booleans, data, integers, sampled_from

from penstock.core.kv.block_pool import BlockPool


def pool_of(num_blocks: int) -> tuple[BlockPool, list[int]]:
    evicted: list[int] = []
    return BlockPool(num_blocks, evicted.append), evicted


def test_block_zero_is_never_given_out():
    pool, _ = pool_of(4)
    assert pool.num_usable == pool.num_available == 3
    assert sorted(pool.allocate() for _ in range(3)) == [1, 2, 3]
    assert pool.num_available == 0 and pool.num_held == 3


def test_a_pool_without_a_usable_block_is_refused():
    with pytest.raises(AssertionError):
        pool_of(1)


def test_a_block_is_free_when_its_last_holder_leaves():
    pool, _ = pool_of(3)
    block = pool.allocate()
    pool.share(block)
    pool.drop(block, None, is_indexed=False)
    assert pool.refs(block) == 1 and pool.num_available == 1
    pool.drop(block, None, is_indexed=False)
    assert pool.refs(block) == 0 and pool.num_available == 2


def test_a_block_that_a_step_in_flight_may_write_waits_for_it():
    pool, _ = pool_of(2)
    block = pool.allocate()
    pool.drop(block, last_step=5, is_indexed=False)
    assert pool.num_quarantined == 1 and pool.num_available == 0 and pool.num_held == 0
    pool.release(4)
    assert pool.num_available == 0
    pool.release(5)
    assert pool.num_quarantined == 0 and pool.allocate() == block


def test_blank_blocks_go_first_then_the_least_recently_freed():
    pool, evicted = pool_of(5)
    first, second, third = (pool.allocate() for _ in range(3))
    for block in (second, first, third):
        pool.drop(block, None, is_indexed=True)
    assert pool.num_reusable == 3 and pool.num_available == 4
    assert pool.allocate() == 4 and not evicted
    assert [pool.allocate() for _ in range(3)] == evicted == [second, first, third]


def test_a_block_that_was_of_use_is_evicted_last():
    pool, evicted = pool_of(4)
    blocks = [pool.allocate() for _ in range(3)]
    for block in blocks:
        pool.drop(block, None, is_indexed=True)
    pool.touch(blocks[0])
    pool.touch(99)  # a block that is not reusable: nothing to move
    assert [pool.allocate() for _ in range(3)] == evicted == [blocks[1], blocks[2], blocks[0]]


@pytest.mark.parametrize("last_step", [None, 3])
def test_an_indexed_block_can_be_shared_after_its_holder_left(last_step):
    pool, evicted = pool_of(2)
    block = pool.allocate()
    pool.drop(block, last_step, is_indexed=True)
    assert pool.is_available(block) == (last_step is None)
    pool.share(block)
    assert pool.refs(block) == pool.num_held == 1
    assert pool.num_quarantined == pool.num_available == 0
    pool.release(9)  # it is held again: no step frees it
    assert pool.num_available == 0 and not evicted


@pytest.mark.parametrize("is_indexed", [False, True])
def test_a_pinned_block_outlives_its_holder_and_holds_up_nobody(is_indexed):
    pool, _ = pool_of(3)
    pinned, other = pool.allocate(), pool.allocate()
    pool.pin(pinned)
    pool.drop(pinned, last_step=5, is_indexed=is_indexed)
    pool.drop(other, last_step=5, is_indexed=False)
    assert pool.refs(pinned) == 1 and pool.num_quarantined == 1
    pool.release(5)
    assert pool.allocate() == other and pool.num_available == 0
    pool.unpin(pinned, is_indexed)
    assert pool.num_available == 1 and pool.num_reusable == is_indexed


def test_a_block_unpinned_before_the_last_step_of_its_holder_waits_for_it():
    pool, _ = pool_of(2)
    block = pool.allocate()
    for _ in range(2):
        pool.pin(block)
    pool.drop(block, last_step=5, is_indexed=False)
    pool.unpin(block, is_indexed=False)
    assert pool.num_held == 1
    pool.unpin(block, is_indexed=False)
    assert pool.num_quarantined == 1 and pool.num_available == 0
    pool.release(5)
    assert pool.num_available == 1


class AnyUse(RuleBasedStateMachine):
    """Any order of calls, against a model that keeps a set for each kind of block."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(7, self.on_evict)
        self.held: Counter[int] = Counter()
        self.indexed: set[int] = set()
        self.waiting: dict[int, int] = {}  # block -> the step it waits for, in order of dropping
        self.pinned: Counter[int] = Counter()
        self.left: dict[int, int] = {}  # of pinned blocks: the last step of holders that left
        self.step = 0

    def on_evict(self, block: int) -> None:
        assert block in self.indexed and not self.held[block] and block not in self.waiting
        self.indexed.remove(block)

    @rule()
    @precondition(lambda self: self.pool.num_available)
    def allocate(self) -> None:
        block = self.pool.allocate()
        assert 1 <= block < 7 and not self.held[block] and block not in self.waiting
        assert block not in self.indexed
        self.held[block] = 1

    @rule(data=data())
    @precondition(lambda self: self.indexed)
    def share(self, data) -> None:
        block = data.draw(sampled_from(sorted(self.indexed)))
        self.pool.share(block)
        self.held[block] += 1
        self.waiting.pop(block, None)

    @rule(data=data(), is_indexed=booleans(), steps_left=integers(-1, 3))
    @precondition(lambda self: self.held - self.pinned)
    def drop(self, data, is_indexed, steps_left) -> None:
        block = data.draw(sampled_from(sorted(self.held - self.pinned)))
        if is_indexed:
            self.indexed.add(block)
        last_step = None if steps_left < 0 else self.step + steps_left
        self.pool.drop(block, last_step, block in self.indexed)
        self.held[block] -= 1
        if self.pinned[block]:
            self.left[block] = max(self.left.get(block, -1), -1 if last_step is None else last_step)
        elif not self.held[block] and last_step is not None:
            self.waiting[block] = last_step

    @rule(data=data())
    @precondition(lambda self: +self.held)
    def pin(self, data) -> None:
        block = data.draw(sampled_from(sorted(+self.held)))
        self.pool.pin(block)
        self.held[block] += 1
        self.pinned[block] += 1

    @rule(data=data())
    @precondition(lambda self: +self.pinned)
    def unpin(self, data) -> None:
        block = data.draw(sampled_from(sorted(+self.pinned)))
        self.pool.unpin(block, block in self.indexed)
        self.held[block] -= 1
        self.pinned[block] -= 1
        last_step = self.left.get(block, -1) if self.pinned[block] else self.left.pop(block, -1)
        if not self.held[block] and last_step >= self.step:
            self.waiting[block] = last_step

    @rule()
    def commit_a_step(self) -> None:
        self.pool.release(self.step)
        for block, last_step in list(self.waiting.items()):
            if last_step > self.step:
                break
            del self.waiting[block]
        self.step += 1

    @invariant()
    def every_block_is_somewhere(self) -> None:
        pool, held = self.pool, set(+self.held)
        reusable = self.indexed - held - set(self.waiting)
        assert pool.num_held == len(held)
        assert pool.num_quarantined == len(self.waiting)
        assert pool.num_reusable == len(reusable)
        assert pool.num_available == 6 - len(held) - len(self.waiting)
        for block in range(1, 7):
            assert pool.refs(block) == self.held[block]
            assert pool.is_available(block) == (block in reusable)


TestAnyUse = AnyUse.TestCase
TestAnyUse.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
