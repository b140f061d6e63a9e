"""`HostTier`: which blocks of host memory hold what of sequences that were swapped out.

Counts host blocks, of each cache group its own. When copies run is the manager's business.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.core.kv.groups import GroupTable


@dataclass(slots=True)
class SwappedOut:
    """The first tokens of a sequence in host memory."""

    num_tokens: int
    tables: tuple[GroupTable, ...]  # of each group, with numbers of host blocks
    step: int  # before which they are copied
    is_made: bool = False  # that step has committed


class HostTier:
    """`num_blocks`: host blocks of each group; none: nothing is swapped out."""

    def __init__(self, num_blocks: Sequence[int]) -> None:
        self.num_blocks = tuple(num_blocks)
        self._free = [list(range(num))[::-1] for num in num_blocks]
        self._swapped: dict[int, SwappedOut] = {}  # by owner

    def has_room(self, tables: Sequence[GroupTable]) -> bool:
        return bool(self._free) and all(
            len(table.blocks) - table.num_evicted <= len(free)
            for table, free in zip(tables, self._free, strict=True)
        )

    def put(
        self, owner: int, num_tokens: int, tables: Sequence[GroupTable], step: int
    ) -> SwappedOut:
        """Host blocks for what these tables hold; there must be room."""
        assert owner not in self._swapped, owner
        host_tables = []
        for table, free in zip(tables, self._free, strict=True):
            evicted, held = table.blocks[: table.num_evicted], table.blocks[table.num_evicted :]
            host_tables.append(replace(table, blocks=[*evicted, *(free.pop() for _ in held)]))
        swapped = SwappedOut(num_tokens, tuple(host_tables), step)
        self._swapped[owner] = swapped
        return swapped

    def get(self, owner: int) -> SwappedOut | None:
        return self._swapped.get(owner)

    def drop(self, owner: int) -> None:
        """Its host blocks may be taken at once: copies run in the order in which they are asked."""
        swapped = self._swapped.pop(owner, None)
        if swapped is not None:
            for table, free in zip(swapped.tables, self._free, strict=True):
                free += table.blocks[table.num_evicted :]

    @property
    def num_free_blocks(self) -> tuple[int, ...]:
        return tuple(map(len, self._free))
