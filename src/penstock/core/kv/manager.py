"""One face over the cache groups of one data-parallel rank: match, open, grow, index, close.

A `Holder` owns references to blocks; a sequence owns a holder while it runs. Nothing here knows
requests, rows or steps beyond their number.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from penstock.core.kv.groups import CacheGroup, GroupMatch, GroupTable
from penstock.core.kv.prefix_index import ExtraKeys, Tokens
from penstock.types.step import Move


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    num_tokens: int
    groups: tuple[GroupMatch, ...]


@dataclass(frozen=True, slots=True)
class NewBlock:
    group: int
    index: int  # position in the holder's table
    block: int


@dataclass(frozen=True, slots=True)
class BlockCopy:
    group: int
    src: int
    dst: int
    move: Move = Move.WITHIN


@dataclass(frozen=True, slots=True)
class SwappedOut:
    """The first tokens of a preempted sequence: copies of its blocks in host memory."""

    num_tokens: int
    host_blocks: tuple[int, ...]
    step: int  # before which they are made


@dataclass(slots=True)
class Holder:
    tables: tuple[GroupTable, ...]
    _num_sent: list[int]

    def unsent(self) -> list[NewBlock]:
        """Blocks gained since the last call, for the device's own table."""
        new: list[NewBlock] = []
        for g, table in enumerate(self.tables):
            num_sent, num_now = self._num_sent[g], len(table.blocks)
            if num_sent != num_now:  # in most steps there is none
                new += [NewBlock(g, i, table.blocks[i]) for i in range(num_sent, num_now)]
                self._num_sent[g] = num_now
        return new


class KVManager:
    """`num_host_blocks`: blocks of host memory, used if every group keeps all tokens."""

    def __init__(self, groups: Sequence[CacheGroup], num_host_blocks: int = 0) -> None:
        self.groups = tuple(groups)
        self.num_host_blocks = num_host_blocks if len(groups) == 1 else 0
        self._free_host_blocks = list(range(self.num_host_blocks))[::-1]

    def match(self, extra_keys: ExtraKeys, tokens: Tokens, limit: int) -> PrefixMatch:
        """The longest prefix, at most `limit` tokens, that every group can take over."""
        while True:
            found = []
            for group in self.groups:
                found.append(group.match(extra_keys, tokens, limit))
                limit = found[-1].num_tokens
            if all(match.num_tokens == limit for match in found):
                return PrefixMatch(limit, tuple(found))

    def fits(
        self, match: PrefixMatch, num_tokens: int, num_spare: int, spare_share: float = 0.0
    ) -> bool:
        """Whether a holder of `num_tokens` could open now and leave so many blocks of each group,
        and such a share of them."""
        return all(
            group.has_room(
                part, num_tokens, max(num_spare, int(spare_share * group.pool.num_usable))
            )
            for group, part in zip(self.groups, match.groups, strict=True)
        )

    def open(
        self, match: PrefixMatch, num_tokens: int, swapped: SwappedOut | None = None
    ) -> tuple[Holder, list[BlockCopy]]:
        """A holder for a sequence of `num_tokens`: the matched prefix is shared, what was `swapped`
        out beyond it comes back; `grow` before use."""
        host_blocks: tuple[int, ...] = ()
        if swapped is not None and swapped.num_tokens > match.num_tokens:
            host_blocks = swapped.host_blocks
        tables, copies = [], []
        for g, (group, part) in enumerate(zip(self.groups, match.groups, strict=True)):
            table, pairs = group.open(replace(part, copy_from=None) if host_blocks else part)
            group.reserve(table, num_tokens)
            tables.append(table)
            copies += [BlockCopy(g, src, dst) for src, dst in pairs]
            first = len(part.shared)
            back = zip(host_blocks[first:], table.blocks[first:], strict=False)
            copies += [BlockCopy(g, src, dst, Move.SWAP_IN) for src, dst in back]
        return Holder(tuple(tables), [0] * len(tables)), copies

    def swap_out(
        self, holder: Holder, num_tokens: int, step: int
    ) -> tuple[SwappedOut | None, list[BlockCopy]]:
        """Copy the blocks of the first tokens to host memory, before `step`, for a holder that is
        about to close; None where there is no room."""
        blocks = holder.tables[0].blocks[: self.groups[0].most_blocks(num_tokens)]
        if not 0 < len(blocks) <= len(self._free_host_blocks):
            return None, []
        host_blocks = [self._free_host_blocks.pop() for _ in blocks]
        pairs = zip(blocks, host_blocks, strict=True)
        copies = [BlockCopy(0, src, dst, Move.SWAP_OUT) for src, dst in pairs]
        return SwappedOut(num_tokens, tuple(host_blocks), step), copies

    def drop_swapped(self, swapped: SwappedOut) -> None:
        """Its host blocks may be taken at once: copies run in the order in which they are asked."""
        self._free_host_blocks += swapped.host_blocks

    @property
    def num_free_host_blocks(self) -> int:
        return len(self._free_host_blocks)

    @property
    def num_free_host_tokens(self) -> int:
        """Tokens that host memory has room for."""
        return self.num_free_host_blocks * self.groups[0].block_size

    def needs_blocks(self, holder: Holder, num_tokens: int) -> bool:
        return any(group.num_missing(table, num_tokens) for group, table in self._tables(holder))

    def shortfall(self, holder: Holder, num_tokens: int) -> int:
        """Blocks that some holder must give back before `holder` can reach `num_tokens`."""
        return max(
            g.num_missing(t, num_tokens) - g.pool.num_available - g.pool.num_quarantined
            for g, t in self._tables(holder)
        )

    def grow(self, holder: Holder, num_tokens: int) -> bool:
        """Room for `num_tokens`; False, and nothing changed, when blocks are not free yet."""
        if any(
            g.num_missing(t, num_tokens) > g.pool.num_available for g, t in self._tables(holder)
        ):
            return False
        for group, table in self._tables(holder):
            group.grow(table, num_tokens)
        return True

    def chunk_limit(self, start: int, num_tokens: int, end: int) -> int:
        for group in self.groups:
            num_tokens = group.chunk_limit(start, num_tokens, end)
        return num_tokens

    def before_step(
        self, holder: Holder, tokens: Tokens, num_computed: int, step: int
    ) -> list[BlockCopy]:
        """What to copy before `step` goes on from the first `num_computed` tokens."""
        return [
            BlockCopy(g, src, dst)
            for g, (group, table) in enumerate(self._tables(holder))
            for src, dst in group.before_step(table, tokens, num_computed, step)
        ]

    def index(self, holder: Holder, tokens: Tokens, num_computed: int) -> None:
        for group, table in self._tables(holder):
            group.index(table, tokens, num_computed)

    def close(self, holder: Holder, last_step: int) -> None:
        """Give all references back; blocks are reused only after `last_step` has committed."""
        for group, table in self._tables(holder):
            group.close(table, last_step)

    def release(self, committed_step: int) -> None:
        for group in self.groups:
            group.pool.release(committed_step)

    def could_hold(self, lengths: Sequence[int]) -> bool:
        """Whether sequences of these lengths that share nothing fit, all at once."""
        return all(
            sum(map(group.most_blocks, lengths)) <= group.pool.num_usable for group in self.groups
        )

    @property
    def num_free_tokens(self) -> int:
        """By which sequences can grow now, all together."""
        return min(group.num_free_tokens for group in self.groups)

    @property
    def num_usable(self) -> int:
        return sum(group.pool.num_usable for group in self.groups)

    @property
    def num_held(self) -> int:
        return sum(group.pool.num_held for group in self.groups)

    @property
    def num_reusable(self) -> int:
        return sum(group.pool.num_reusable for group in self.groups)

    def _tables(self, holder: Holder) -> Iterator[tuple[CacheGroup, GroupTable]]:
        return zip(self.groups, holder.tables, strict=True)
