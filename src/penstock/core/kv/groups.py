"""Cache groups: layers that remember the same way share one, with its own blocks and its own rules.

`FullGroup` keeps every token, `WindowGroup` those that a window still sees, `StateGroup` one state
of the whole sequence. They share a protocol: the manager asks all groups, the scheduler knows none.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, Protocol

from penstock.core.kv.block_pool import BlockPool
from penstock.core.kv.prefix_index import (
    ROOT,
    ExtraKeys,
    Keys,
    PrefixIndex,
    Tokens,
    next_digest,
)
from penstock.types.cache_spec import state_blocks_needed

NO_BLOCK = 0  # where a table holds nothing; padded device rows write to the block of this number
# A chat template's generation prompt is no longer than this. Seven are the most known.
_GENERATION_PROMPT_TOKENS = 8


def num_blocks(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


@dataclass(slots=True)
class GroupTable:
    """One holder's blocks in one group, in the order of its tokens."""

    digests: list[bytes]  # digests[i] covers the first i full blocks
    extra_keys: ExtraKeys  # of its blocks
    blocks: list[int] = field(default_factory=list)
    num_evicted: int = 0  # of the first blocks: out of the window, NO_BLOCK in the list


class BlockCopy(NamedTuple):
    """`done` is called once, when it is known whether the copy was made."""

    src: int
    dst: int
    done: Callable[[bool], None] | None = None


@dataclass(frozen=True, slots=True)
class GroupMatch:
    """A prefix found in the cache: blocks to share, then a block to copy the beginning of.

    NO_BLOCK stands for a block that is not needed for what follows the prefix.
    """

    num_tokens: int
    digests: tuple[bytes, ...]  # one more than shared: the root first
    extra_keys: ExtraKeys
    shared: tuple[int, ...] = ()
    copy_from: int | None = None


class CacheGroup(Protocol):
    pool: BlockPool
    block_size: int  # tokens

    def match(self, extra_keys: ExtraKeys, tokens: Tokens, limit: int) -> GroupMatch:
        """The longest prefix, at most `limit` tokens, this group could take over."""

    def has_room(self, match: GroupMatch, num_tokens: int, num_spare: int) -> bool:
        """Whether a sequence of `num_tokens` could start from `match` now and leave `num_spare`."""

    def most_blocks(self, num_tokens: int) -> int:
        """Blocks set aside for a sequence that grows to `num_tokens`; 0: they are never scarce."""

    @property
    def num_free_tokens(self) -> int:
        """By which sequences can grow now, all together."""

    def open(self, match: GroupMatch) -> tuple[GroupTable, list[BlockCopy]]:
        """A table that holds the match, and what to copy for it."""

    def written(self, table: GroupTable, num_tokens: int) -> GroupTable:
        """The part of the table that holds the first `num_tokens`, and is needed to go on."""

    def reopen(
        self, match: GroupMatch, elsewhere: GroupTable
    ) -> tuple[GroupTable, list[BlockCopy]]:
        """A table for what blocks of another pool hold, and what to copy from there; what is found
        in the cache (`match`) is shared."""

    def reserve(self, table: GroupTable, num_tokens: int) -> None:
        """A sequence of `num_tokens` starts: take the blocks that must not be missing later."""

    def num_missing(self, table: GroupTable, num_tokens: int) -> int:
        """Blocks the table lacks to hold `num_tokens`."""

    def grow(self, table: GroupTable, num_tokens: int) -> None: ...

    def chunk_limit(self, start: int, num_tokens: int, end: int) -> int:
        """Shortens a chunk from `start` of a prefill of `end` tokens to where the group wants."""

    def before_step(
        self, table: GroupTable, tokens: Tokens, num_computed: int, step: int
    ) -> list[BlockCopy]:
        """What to copy before `step` goes on from the first `num_computed` of `tokens`."""

    def index(self, table: GroupTable, tokens: Tokens, num_computed: int) -> None:
        """The first `num_computed` tokens are in the cache for good: make their blocks findable."""

    def close(self, table: GroupTable, last_step: int) -> None: ...

    def unpin(self, block: int) -> None: ...


class FullGroup:
    """Every token of the sequence stays; full blocks are shared, a partly equal block is copied."""

    def __init__(self, num_blocks: int, block_size: int, reuse: bool, partial_reuse: bool) -> None:
        self.block_size = block_size
        self._reuse = reuse
        self._partial_reuse = partial_reuse
        self._index = PrefixIndex()
        self.pool = BlockPool(num_blocks, self._index.remove)

    def match(self, extra_keys: ExtraKeys, tokens: Tokens, limit: int) -> GroupMatch:
        digests = [ROOT]
        shared: list[int] = []
        if not self._reuse:
            return GroupMatch(0, tuple(digests), extra_keys)
        for start in range(0, limit - self.block_size + 1, self.block_size):
            block_tokens = tokens[start : start + self.block_size]
            keys = extra_keys.get(len(shared), ())
            digest = next_digest(digests[-1], block_tokens, keys)
            block = self._index.find(digest, block_tokens, keys)
            if block is None:
                break
            digests.append(digest)
            shared.append(block)
        num_tokens = len(shared) * self.block_size
        rest = tokens[num_tokens : min(limit, num_tokens + self.block_size)]
        if self._partial_reuse and len(rest):
            keys = extra_keys.get(len(shared), ())
            block, num_equal = self._index.find_partial(digests[-1], rest, keys)
            if num_equal:
                num_tokens += num_equal
                return GroupMatch(num_tokens, tuple(digests), extra_keys, tuple(shared), block)
        return GroupMatch(num_tokens, tuple(digests), extra_keys, tuple(shared))

    def has_room(self, match: GroupMatch, num_tokens: int, num_spare: int) -> bool:
        num_free_riders = sum(not self.pool.is_available(block) for block in match.shared)
        num_taken = num_blocks(num_tokens, self.block_size) - num_free_riders
        return num_taken + num_spare <= self.pool.num_available

    def most_blocks(self, num_tokens: int) -> int:
        return num_blocks(num_tokens, self.block_size)

    @property
    def num_free_tokens(self) -> int:
        return self.pool.num_available * self.block_size

    def open(self, match: GroupMatch) -> tuple[GroupTable, list[BlockCopy]]:
        for block in match.shared:
            if block != NO_BLOCK:
                self.pool.share(block)
        num_evicted = match.shared.count(NO_BLOCK)
        table = GroupTable(list(match.digests), match.extra_keys, list(match.shared), num_evicted)
        if match.copy_from is None:
            return table, []
        self.pool.touch(match.copy_from)
        table.blocks.append(self.pool.allocate())
        # With nothing else left the source itself was evicted: it already holds what is wanted.
        is_copy = table.blocks[-1] != match.copy_from
        return table, [BlockCopy(match.copy_from, table.blocks[-1])] if is_copy else []

    def written(self, table: GroupTable, num_tokens: int) -> GroupTable:
        blocks = table.blocks[: num_blocks(num_tokens, self.block_size)]
        return replace(table, digests=list(table.digests), blocks=blocks)

    def reopen(
        self, match: GroupMatch, elsewhere: GroupTable
    ) -> tuple[GroupTable, list[BlockCopy]]:
        num_evicted = elsewhere.num_evicted
        shared = match.shared[num_evicted:]
        for block in shared:
            self.pool.share(block)
        sources = elsewhere.blocks[num_evicted + len(shared) :]
        new = [self.pool.allocate() for _ in sources]
        # Blocks behind these digests are indexed when they have been copied.
        digests = elsewhere.digests[: max(num_evicted, len(match.shared)) + 1]
        blocks = [*elsewhere.blocks[:num_evicted], *shared, *new]
        table = GroupTable(digests, elsewhere.extra_keys, blocks, num_evicted)
        return table, list(map(BlockCopy, sources, new))

    def reserve(self, table: GroupTable, num_tokens: int) -> None:
        self.grow(table, num_tokens)

    def num_missing(self, table: GroupTable, num_tokens: int) -> int:
        return max(0, num_blocks(num_tokens, self.block_size) - len(table.blocks))

    def grow(self, table: GroupTable, num_tokens: int) -> None:
        for _ in range(self.num_missing(table, num_tokens)):
            table.blocks.append(self.pool.allocate())

    def chunk_limit(self, start: int, num_tokens: int, end: int) -> int:
        return num_tokens

    def before_step(
        self, table: GroupTable, tokens: Tokens, num_computed: int, step: int
    ) -> list[BlockCopy]:
        return []

    def index(self, table: GroupTable, tokens: Tokens, num_computed: int) -> None:
        if not self._reuse:
            return
        for i in range(len(table.digests) - 1, num_computed // self.block_size):
            block_tokens = tokens[i * self.block_size : (i + 1) * self.block_size]
            keys = table.extra_keys.get(i, ())
            digest = next_digest(table.digests[i], block_tokens, keys)
            self._index.insert(table.blocks[i], table.digests[i], digest, block_tokens, keys)
            table.digests.append(digest)

    def close(self, table: GroupTable, last_step: int) -> None:
        # Last block first: the tail of a sequence is evicted before a prefix that others may share.
        for block in reversed(table.blocks[table.num_evicted :]):
            self.pool.drop(block, last_step, block in self._index)
        table.blocks.clear()

    def unpin(self, block: int) -> None:
        self.pool.unpin(block, block in self._index)


class WindowGroup(FullGroup):
    """Only blocks with one of the last `window` tokens stay with their holder.

    Blocks are taken chunk by chunk, and `window_blocks_needed` is always enough, so that no
    admission need ask for them. A block out of the window can be found again until it is given to
    another.
    """

    def __init__(
        self, num_blocks: int, block_size: int, window: int, reuse: bool, partial_reuse: bool
    ) -> None:
        super().__init__(num_blocks, block_size, reuse, partial_reuse)
        self._window = window

    def match(self, extra_keys: ExtraKeys, tokens: Tokens, limit: int) -> GroupMatch:
        digests, found = [ROOT], list[int]()
        if not self._reuse:
            return GroupMatch(0, tuple(digests), extra_keys)
        for start in range(0, limit - self.block_size + 1, self.block_size):
            block_tokens = tokens[start : start + self.block_size]
            keys = extra_keys.get(len(found), ())
            digests.append(next_digest(digests[-1], block_tokens, keys))
            found.append(self._index.find(digests[-1], block_tokens, keys) or NO_BLOCK)
        # The longest prefix whose window is there, then part of the block behind it.
        for num_full in range(len(found), -1, -1):
            needed = self._first_seen(num_full * self.block_size)
            if NO_BLOCK in found[needed:num_full]:
                continue
            shared = (NO_BLOCK,) * needed + tuple(found[needed:num_full])
            num_tokens, copy_from = num_full * self.block_size, None
            rest = tokens[num_tokens : min(limit, num_tokens + self.block_size)]
            if self._partial_reuse and len(rest):
                keys = extra_keys.get(num_full, ())
                block, num_equal = self._index.find_partial(digests[num_full], rest, keys)
                if num_equal:
                    num_tokens, copy_from = num_tokens + num_equal, block
            known = tuple(digests[: num_full + 1])
            return GroupMatch(num_tokens, known, extra_keys, shared, copy_from)
        raise AssertionError("the empty prefix is always there")

    def has_room(self, match: GroupMatch, num_tokens: int, num_spare: int) -> bool:
        return True

    def most_blocks(self, num_tokens: int) -> int:
        return 0

    @property
    def num_free_tokens(self) -> int:
        return sys.maxsize

    def reserve(self, table: GroupTable, num_tokens: int) -> None:
        pass

    def index(self, table: GroupTable, tokens: Tokens, num_computed: int) -> None:
        super().index(table, tokens, num_computed)
        # Steps in flight begin at num_computed: they neither write nor see what is evicted here.
        for i in range(table.num_evicted, self._first_seen(num_computed)):
            self.pool.drop(table.blocks[i], None, table.blocks[i] in self._index)
            table.blocks[i] = NO_BLOCK
            table.num_evicted = i + 1

    def _first_seen(self, position: int) -> int:
        """Index of the first block that a query at `position` sees."""
        return max(0, position - self._window + 1) // self.block_size


_Rest = tuple[bytes, Keys]  # tokens behind the last full block, and the keys of their block


class StateGroup:
    """One block is the state of a whole sequence, changed by every step. Snapshots of it, taken
    where another sequence may go on, stay until their blocks are needed.

    Three positions of a prompt are worth a snapshot: every `interval` tokens, where sequences with
    a common prefix may part; its end, where the next turn of a chat goes on that repeats all of it;
    and the last full block before the generation prompt, for a next turn that does not repeat
    that, or for the same prompt once more.

    Snapshots lie in whatever blocks no sequence holds. `num_reserved` of them are theirs alone: a
    sequence that starts takes the oldest of more than these, else it waits for a block.
    """

    def __init__(
        self, num_blocks: int, block_size: int, interval: int, max_rows: int, reuse: bool
    ) -> None:
        assert interval % block_size == 0, (interval, block_size)
        self.block_size = block_size  # of the digests
        self._interval = interval
        self._num_reserved = num_blocks - state_blocks_needed(max_rows)
        self._reuse = reuse and self._num_reserved > 0
        self._snapshots: dict[bytes, dict[_Rest, int]] = {}  # full blocks -> what follows -> block
        self._key_of: dict[int, tuple[bytes, _Rest]] = {}
        self._unfinished: set[tuple[bytes, _Rest]] = set()  # not copied yet, as far as is known
        self.pool = BlockPool(num_blocks, self._evict)

    def match(self, extra_keys: ExtraKeys, tokens: Tokens, limit: int) -> GroupMatch:
        digests = [ROOT]
        num_tokens, copy_from = 0, None
        for start in range(0, limit + 1 if self._snapshots else 0, self.block_size):
            if start:
                block_tokens = tokens[start - self.block_size : start]
                keys = extra_keys.get(len(digests) - 1, ())
                digests.append(next_digest(digests[-1], block_tokens, keys))
            for rest, block in self._snapshots.get(digests[-1], {}).items():
                end = start + len(rest[0]) // tokens.itemsize
                is_longer = num_tokens < end <= limit
                if is_longer and rest == self._rest(tokens[:end], extra_keys):
                    num_tokens, copy_from = end, block
        num_full = num_tokens // self.block_size
        known = tuple(digests[: num_full + 1])
        return GroupMatch(num_tokens, known, extra_keys, (), copy_from)

    def has_room(self, match: GroupMatch, num_tokens: int, num_spare: int) -> bool:
        has_blank = self.pool.num_available > self.pool.num_reusable
        num_snapshots = len(self._key_of) + len(self._unfinished)
        has_more = self.pool.num_reusable > 0 and num_snapshots > self._num_reserved
        return has_blank or has_more

    def most_blocks(self, num_tokens: int) -> int:
        return 1

    @property
    def num_free_tokens(self) -> int:
        return sys.maxsize

    def open(self, match: GroupMatch) -> tuple[GroupTable, list[BlockCopy]]:
        if match.copy_from is not None:
            self.pool.touch(match.copy_from)
        table = GroupTable(list(match.digests), match.extra_keys, [self.pool.allocate()])
        if match.copy_from in (None, table.blocks[0]):  # nothing, or evicted and taken itself
            return table, []
        return table, [BlockCopy(match.copy_from, table.blocks[0])]

    def written(self, table: GroupTable, num_tokens: int) -> GroupTable:
        return replace(table, digests=list(table.digests), blocks=list(table.blocks))

    def reopen(
        self, match: GroupMatch, elsewhere: GroupTable
    ) -> tuple[GroupTable, list[BlockCopy]]:
        table = replace(elsewhere, blocks=[self.pool.allocate()])
        return table, [BlockCopy(elsewhere.blocks[0], table.blocks[0])]

    def reserve(self, table: GroupTable, num_tokens: int) -> None:
        pass

    def num_missing(self, table: GroupTable, num_tokens: int) -> int:
        return 0

    def grow(self, table: GroupTable, num_tokens: int) -> None:
        pass

    def chunk_limit(self, start: int, num_tokens: int, end: int) -> int:
        if not self._reuse:
            return num_tokens
        stops = (
            start - start % self._interval + self._interval,
            self._reuse_point(end),
        )
        return min(num_tokens, *(stop - start for stop in stops if stop > start))

    def before_step(
        self, table: GroupTable, tokens: Tokens, num_computed: int, step: int
    ) -> list[BlockCopy]:
        wanted = (len(tokens), self._reuse_point(len(tokens)))
        is_wanted = num_computed in wanted or num_computed % self._interval == 0
        if not self._reuse or num_computed == 0 or not is_wanted:
            return []
        num_full = num_computed // self.block_size
        for i in range(len(table.digests) - 1, num_full):
            block_tokens = tokens[i * self.block_size : (i + 1) * self.block_size]
            keys = table.extra_keys.get(i, ())
            table.digests.append(next_digest(table.digests[i], block_tokens, keys))
        digest = table.digests[num_full]
        rest = self._rest(tokens[:num_computed], table.extra_keys)
        if (known := self._snapshots.get(digest, {}).get(rest)) is not None:
            self.pool.touch(known)
            return []
        if (digest, rest) in self._unfinished or not self.pool.num_available:
            return []
        block = self.pool.allocate()
        self.pool.pin(block)  # by the copy: until it was made nobody may find it
        self.pool.drop(block, step, is_indexed=False)
        self._unfinished.add((digest, rest))
        done = partial(self._finish_snapshot, digest, rest, block)
        return [BlockCopy(table.blocks[0], block, done)]

    def index(self, table: GroupTable, tokens: Tokens, num_computed: int) -> None:
        pass

    def close(self, table: GroupTable, last_step: int) -> None:
        self.pool.drop(table.blocks.pop(), last_step, is_indexed=False)

    def unpin(self, block: int) -> None:
        self.pool.unpin(block, block in self._key_of)

    def _finish_snapshot(self, digest: bytes, rest: _Rest, block: int, is_made: bool) -> None:
        self._unfinished.remove((digest, rest))
        if is_made:
            self._snapshots.setdefault(digest, {})[rest] = block
            self._key_of[block] = (digest, rest)
        self.unpin(block)

    def _rest(self, tokens: Tokens, extra_keys: ExtraKeys) -> _Rest:
        """What of `tokens` follows their last full block."""
        num_full = len(tokens) // self.block_size
        rest = tokens[num_full * self.block_size :].tobytes()
        return rest, extra_keys.get(num_full, ()) if rest else ()

    def _reuse_point(self, end: int) -> int:
        """The last full block of a prompt of `end` tokens that the next turn of a chat repeats."""
        return max(0, end - _GENERATION_PROMPT_TOKENS) // self.block_size * self.block_size

    def _evict(self, block: int) -> None:
        digest, rest = self._key_of.pop(block)
        del self._snapshots[digest][rest]
        if not self._snapshots[digest]:
            del self._snapshots[digest]
