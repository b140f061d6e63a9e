"""One face over the cache groups of one data-parallel rank: match, open, grow, index, close.

A `Holder` owns references to blocks; a sequence owns a holder while it runs. Nothing here knows
requests, rows or steps beyond their number. What must be copied is gathered here, in order, until
a plan takes it (`take_ops`).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from penstock.core.kv.completions import Completions
from penstock.core.kv.groups import BlockCopy, CacheGroup, GroupMatch, GroupTable
from penstock.core.kv.host_tier import HostTier, SwappedOut
from penstock.core.kv.prefix_index import ExtraKeys, Tokens
from penstock.types.step import CacheOp, CopyBlock, SwapIn, SwapOut


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    num_tokens: int  # found in the cache
    groups: tuple[GroupMatch, ...]
    swapped: SwappedOut | None = None  # comes back from the host, if it is more

    @property
    def num_computed(self) -> int:
        """Tokens that need not be computed."""
        return self.num_tokens if self.swapped is None else self.swapped.num_tokens


@dataclass(frozen=True, slots=True)
class NewBlock:
    group: int
    index: int  # position in the holder's table
    block: int


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


Pin = tuple[tuple[int, int], ...]  # (group, block): references of an operation, not of a holder


class KVManager:
    """`num_host_blocks`: of each group, blocks of host memory for what is swapped out."""

    def __init__(
        self, groups: Sequence[CacheGroup], num_host_blocks: Sequence[int] = (), dp_rank: int = 0
    ) -> None:
        assert len(num_host_blocks) in (0, len(groups)), num_host_blocks
        self.groups = tuple(groups)
        self.num_swapped_out = 0  # blocks since start
        self.num_swapped_in = 0
        self._dp_rank = dp_rank
        self._host = HostTier(num_host_blocks)
        self._ops: list[CacheOp] = []
        self._completions = Completions()

    def match(
        self, extra_keys: ExtraKeys, tokens: Tokens, limit: int, owner: int | None = None
    ) -> PrefixMatch:
        """The longest prefix, at most `limit` tokens, that every group can take over, or what was
        swapped out of `owner`."""
        swapped = None if owner is None else self._host.get(owner)
        while True:
            found = []
            for group in self.groups:
                found.append(group.match(extra_keys, tokens, limit))
                limit = found[-1].num_tokens
            if all(match.num_tokens == limit for match in found):
                break
        if swapped is not None and swapped.num_tokens <= limit:
            swapped = None
        return PrefixMatch(limit, tuple(found), swapped)

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

    def open(self, match: PrefixMatch, num_tokens: int) -> Holder:
        """A holder for a sequence of `num_tokens` that begins with the match; `grow` before use."""
        tables = []
        for g, (group, part) in enumerate(zip(self.groups, match.groups, strict=True)):
            if match.swapped is None:
                table, copies = group.open(part)
                self._copy(CopyBlock, g, copies)
            else:
                table, copies = group.reopen(part, match.swapped.tables[g])
                self._copy(SwapIn, g, copies)
                self.num_swapped_in += len(copies)
            group.reserve(table, num_tokens)
            tables.append(table)
        return Holder(tuple(tables), [0] * len(tables))

    # Host memory: `owner` is the id of what was swapped out, which holds no block meanwhile

    def can_swap_out(self, holder: Holder, num_tokens: int) -> bool:
        return self._host.has_room(self._written(holder, num_tokens))

    def swap_out(self, owner: int, holder: Holder, num_tokens: int, step: int) -> None:
        """Copy what holds the first tokens to host memory, before `step`, if there is room. The
        holder is about to close, and no step in flight writes its blocks."""
        tables = self._written(holder, num_tokens)
        if not self._host.has_room(tables):
            return
        swapped = self._host.put(owner, num_tokens, tables, step)
        for g, (table, host_table) in enumerate(zip(tables, swapped.tables, strict=True)):
            pairs = zip(table.blocks, host_table.blocks, strict=True)
            copies = [BlockCopy(*pair) for pair in pairs][table.num_evicted :]
            self._copy(SwapOut, g, copies)
            self.num_swapped_out += len(copies)
        self._completions.add(step, partial(self._finish_swap_out, owner, swapped))

    def is_swapped_out(self, owner: int) -> bool:
        return self._host.get(owner) is not None

    def is_swapping_out(self, owner: int, step: int) -> bool:
        """Whether a step before `step` copies its blocks, and may still fail to."""
        swapped = self._host.get(owner)
        return swapped is not None and not swapped.is_made and swapped.step < step

    def drop_swapped(self, owner: int) -> None:
        """It has come back, or never will."""
        self._host.drop(owner)

    @property
    def num_free_host_tokens(self) -> int:
        """Tokens that host memory has room for."""
        num_free = self._host.num_free_blocks
        return num_free[0] * self.groups[0].block_size if num_free and all(num_free) else 0

    def _written(self, holder: Holder, num_tokens: int) -> list[GroupTable]:
        return [group.written(table, num_tokens) for group, table in self._tables(holder)]

    def _finish_swap_out(self, owner: int, swapped: SwappedOut, is_made: bool) -> None:
        swapped.is_made = is_made
        if not is_made and self._host.get(owner) is swapped:
            self._host.drop(owner)

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

    def before_step(self, holder: Holder, tokens: Tokens, num_computed: int, step: int) -> None:
        """Copy what must be before `step` goes on from the first `num_computed` tokens."""
        for g, (group, table) in enumerate(self._tables(holder)):
            copies = group.before_step(table, tokens, num_computed, step)
            self._copy(CopyBlock, g, copies)
            for copy in copies:
                if copy.done is not None:
                    self._completions.add(step, copy.done)

    def take_ops(self) -> list[CacheOp]:
        """What the next step does before its forward, in order."""
        ops, self._ops = self._ops, []
        return ops

    def index(self, holder: Holder, tokens: Tokens, num_computed: int) -> None:
        for group, table in self._tables(holder):
            group.index(table, tokens, num_computed)

    def close(self, holder: Holder, last_step: int) -> None:
        """Give all references back; blocks are reused only after `last_step` has committed."""
        for group, table in self._tables(holder):
            group.close(table, last_step)

    def pin(self, holder: Holder) -> Pin:
        """What the holder has now stays until `unpin`, however early the holder closes. A group
        that is never short must have blocks to spare for it."""
        pin = tuple(
            (g, block)
            for g, table in enumerate(holder.tables)
            for block in table.blocks[table.num_evicted :]
        )
        for g, block in pin:
            self.groups[g].pool.pin(block)
        return pin

    def unpin(self, pin: Pin) -> None:
        for g, block in pin:
            self.groups[g].unpin(block)

    def commit(self, step: int, failed: bool = False) -> None:
        """`step` has run, or failed: no earlier one is in flight."""
        self._completions.settle(step, failed)
        for group in self.groups:
            group.pool.release(step)

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

    def _copy(self, kind: type[CacheOp], group: int, copies: Iterable[BlockCopy]) -> None:
        self._ops += [
            kind(dp_rank=self._dp_rank, group=group, src=copy.src, dst=copy.dst) for copy in copies
        ]

    def _tables(self, holder: Holder) -> Iterator[tuple[CacheGroup, GroupTable]]:
        return zip(self.groups, holder.tables, strict=True)
