"""Which cache blocks are free: counts references, keeps reusable blocks, evicts the oldest.

A block is in exactly one place: held (references > 0), quarantined (freed, but a step in flight
may still write it), reusable (free, its contents indexed) or blank (free, contents unknown). Block
0 is never given out: padded device rows write there.

References are those of holders, and pins: those of operations, which may outlast any holder.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable

from penstock.types.cache_spec import RESERVED_BLOCKS


class BlockPool:
    def __init__(self, num_blocks: int, on_evict: Callable[[int], None]) -> None:
        assert num_blocks > RESERVED_BLOCKS, num_blocks
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self._refs = [0] * num_blocks  # with pins
        self._pins: Counter[int] = Counter()
        self._pinned_last_step: dict[int, int] = {}  # of the holders that left a pinned block
        self._committed_step = -1
        self._blank: deque[int] = deque(range(RESERVED_BLOCKS, num_blocks))
        self._reusable: OrderedDict[int, None] = OrderedDict()  # least recently freed first
        self._quarantine: OrderedDict[int, tuple[int, bool]] = (
            OrderedDict()
        )  # -> (last step, indexed)

    @property
    def num_usable(self) -> int:
        return self.num_blocks - RESERVED_BLOCKS

    @property
    def num_available(self) -> int:
        return len(self._blank) + len(self._reusable)

    @property
    def num_quarantined(self) -> int:
        return len(self._quarantine)

    @property
    def num_reusable(self) -> int:
        return len(self._reusable)

    @property
    def num_held(self) -> int:
        return self.num_usable - self.num_available - self.num_quarantined

    def refs(self, block: int) -> int:
        return self._refs[block]

    def is_available(self, block: int) -> bool:
        return block in self._reusable

    def touch(self, block: int) -> None:
        """Its contents were just of use: evict it last."""
        if block in self._reusable:
            self._reusable.move_to_end(block)

    def allocate(self) -> int:
        """A block for a new holder: a blank one, else the least recently freed reusable one."""
        if self._blank:
            block = self._blank.popleft()
        else:
            block, _ = self._reusable.popitem(last=False)
            self._on_evict(block)
        assert self._refs[block] == 0, block
        self._refs[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more holder of an indexed block, whether it is held, quarantined or reusable now."""
        if self._refs[block] == 0:
            self._quarantine.pop(block, None)
            self._reusable.pop(block, None)
        self._refs[block] += 1

    def drop(self, block: int, last_step: int | None, is_indexed: bool) -> None:
        """One holder less. With none left the block is free once `last_step` has committed; None:
        no step in flight writes it, so at once."""
        last_step = -1 if last_step is None else last_step
        self._refs[block] -= 1
        assert self._refs[block] >= self._pins[block], block
        if self._pins[block]:
            self._pinned_last_step[block] = max(last_step, self._pinned_last_step.get(block, -1))
        if self._refs[block] > 0:
            return
        if last_step <= self._committed_step:
            self._free(block, is_indexed)
        else:
            self._quarantine[block] = (last_step, is_indexed)

    def pin(self, block: int) -> None:
        """One more reference, which no step gives back: `unpin` does, whenever that is."""
        self.share(block)
        self._pins[block] += 1

    def unpin(self, block: int, is_indexed: bool) -> None:
        self._pins[block] -= 1
        assert self._pins[block] >= 0, block
        last_step = None
        if not self._pins[block]:
            del self._pins[block]
            last_step = self._pinned_last_step.pop(block, None)
        self.drop(block, last_step, is_indexed)

    def release(self, committed_step: int) -> None:
        """Steps up to `committed_step` have committed: blocks only they could write are free."""
        self._committed_step = max(committed_step, self._committed_step)
        # In order of dropping: a block waits for those dropped before it, at most a few steps.
        while self._quarantine:
            block, (last_step, is_indexed) = next(iter(self._quarantine.items()))
            if last_step > committed_step:
                return
            del self._quarantine[block]
            self._free(block, is_indexed)

    def _free(self, block: int, is_indexed: bool) -> None:
        if is_indexed:
            self._reusable[block] = None
        else:
            self._blank.append(block)
