"""Cache groups: layers that remember the same way share one, with its own blocks and its own rules.

`FullGroup` keeps every token. A group that keeps less (a window, a state) implements the same
protocol; the manager asks all groups and the scheduler knows none of them.
"""

from dataclasses import dataclass, field
from typing import Protocol

from penstock.core.kv.block_pool import BlockPool
from penstock.core.kv.prefix_index import PrefixIndex, Tokens, next_digest, root_digest


def num_blocks(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


@dataclass(slots=True)
class GroupTable:
    """One holder's blocks in one group, in the order of its text."""

    digests: list[bytes]  # digests[i] covers the first i full blocks; [0] is the root of its keys
    blocks: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class GroupMatch:
    """A prefix found in the cache: blocks to share, then a block to copy the beginning of."""

    num_tokens: int
    digests: tuple[bytes, ...]  # one more than shared: the root first
    shared: tuple[int, ...] = ()
    copy_from: int | None = None


class CacheGroup(Protocol):
    pool: BlockPool

    def match(self, keys: tuple[str, ...], tokens: Tokens, limit: int) -> GroupMatch:
        """The longest prefix, at most `limit` tokens, this group could take over."""

    def cost(self, match: GroupMatch, num_tokens: int) -> int:
        """Available blocks that a table of `num_tokens` starting from `match` would take."""

    def open(self, match: GroupMatch) -> tuple[GroupTable, list[tuple[int, int]]]:
        """A table that holds the match, and the (source, destination) blocks to copy for it."""

    def num_missing(self, table: GroupTable, num_tokens: int) -> int:
        """Blocks the table lacks to hold `num_tokens`."""

    def grow(self, table: GroupTable, num_tokens: int) -> None: ...

    def chunk_limit(self, start: int, num_tokens: int) -> int:
        """Shortens a prefill chunk from `start` so that it ends on this group's own boundary."""

    def index(self, table: GroupTable, tokens: Tokens, num_computed: int) -> None:
        """The first `num_computed` tokens are in the cache for good: make their blocks findable."""

    def close(self, table: GroupTable, last_step: int) -> None: ...


class FullGroup:
    """Every token of the text stays; full blocks are shared, a partly equal block is copied."""

    def __init__(self, num_blocks: int, block_size: int, reuse: bool, partial_reuse: bool) -> None:
        self.block_size = block_size
        self._reuse = reuse
        self._partial_reuse = partial_reuse
        self._index = PrefixIndex()
        self.pool = BlockPool(num_blocks, self._index.remove)

    def match(self, keys: tuple[str, ...], tokens: Tokens, limit: int) -> GroupMatch:
        digests = [root_digest(keys)]
        shared: list[int] = []
        if not self._reuse:
            return GroupMatch(0, tuple(digests))
        for start in range(0, limit - self.block_size + 1, self.block_size):
            block_tokens = tokens[start : start + self.block_size]
            digest = next_digest(digests[-1], block_tokens)
            block = self._index.find(digest, block_tokens)
            if block is None:
                break
            digests.append(digest)
            shared.append(block)
        num_tokens = len(shared) * self.block_size
        rest = tokens[num_tokens : min(limit, num_tokens + self.block_size)]
        if self._partial_reuse and len(rest):
            block, num_equal = self._index.find_partial(digests[-1], rest)
            if num_equal:
                num_tokens += num_equal
                return GroupMatch(num_tokens, tuple(digests), tuple(shared), block)
        return GroupMatch(num_tokens, tuple(digests), tuple(shared))

    def cost(self, match: GroupMatch, num_tokens: int) -> int:
        num_free_riders = sum(not self.pool.is_available(block) for block in match.shared)
        return num_blocks(num_tokens, self.block_size) - num_free_riders

    def open(self, match: GroupMatch) -> tuple[GroupTable, list[tuple[int, int]]]:
        for block in match.shared:
            self.pool.share(block)
        table = GroupTable(list(match.digests), list(match.shared))
        if match.copy_from is None:
            return table, []
        self.pool.touch(match.copy_from)
        table.blocks.append(self.pool.allocate())
        # With nothing else left the source itself was evicted: it already holds what is wanted.
        is_copy = table.blocks[-1] != match.copy_from
        return table, [(match.copy_from, table.blocks[-1])] if is_copy else []

    def num_missing(self, table: GroupTable, num_tokens: int) -> int:
        return max(0, num_blocks(num_tokens, self.block_size) - len(table.blocks))

    def grow(self, table: GroupTable, num_tokens: int) -> None:
        for _ in range(self.num_missing(table, num_tokens)):
            table.blocks.append(self.pool.allocate())

    def chunk_limit(self, start: int, num_tokens: int) -> int:
        return num_tokens

    def index(self, table: GroupTable, tokens: Tokens, num_computed: int) -> None:
        if not self._reuse:
            return
        for i in range(len(table.digests) - 1, num_computed // self.block_size):
            block_tokens = tokens[i * self.block_size : (i + 1) * self.block_size]
            digest = next_digest(table.digests[i], block_tokens)
            self._index.insert(table.blocks[i], table.digests[i], digest, block_tokens)
            table.digests.append(digest)

    def close(self, table: GroupTable, last_step: int) -> None:
        # Last block first: the tail of a text is evicted before the prefix that others may share.
        for block in reversed(table.blocks):
            self.pool.drop(block, last_step, block in self._index)
        table.blocks.clear()
