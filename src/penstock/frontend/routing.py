"""`Router`: which of several engines takes a request: one that has its prefix, unless it is busy.

Knows ids, keys and loads, and neither engines nor clients. A later turn of a conversation begins
with the earlier ones, so it goes where they went. What each engine has in its cache is guessed from
what was sent there; nobody is asked. API servers share one table of it.
"""

from array import array
from collections.abc import Iterator, Mapping
from zlib import crc32

from penstock.ipc.shared import Row
from penstock.types.request import Request

_MAX_BLOCKS = 256  # of a prompt, that are looked at
_MIN_SLACK = 4  # requests by which an engine may be ahead of the least busy one
_SLACK = 0.25  # and as a share of its load
_NUM_SLOTS = 1 << 16  # prefixes that are remembered; a newer one takes the slot of an older one
NUM_CELLS = 2 * _NUM_SLOTS  # of the table: of each slot a prefix, and the engines that have it
MAX_ENGINES = 32  # a bit each


class Router:
    """`block_size`: tokens; a shorter common prefix is not looked for. `table`: if it is shared."""

    def __init__(self, block_size: int, table: Row | None = None) -> None:
        self._block_size = block_size
        self._table = array("d", bytes(8 * NUM_CELLS)) if table is None else table
        self._num_routed: dict[int, int] = {}

    def pick(self, loads: Mapping[int, int], request: Request) -> int:
        """One of the engines of `loads`: engine -> requests it has open."""
        least = min(loads.values())
        most = least + max(_MIN_SLACK, int(_SLACK * least))
        prefixes = list(self._prefixes(request))
        matched = self._matched(prefixes)

        def rank(engine: int) -> tuple[int, int, int, int]:
            taken = self._num_routed.get(engine, 0)
            return -matched.get(engine, 0), loads[engine], taken, engine

        chosen = min((engine for engine in loads if loads[engine] <= most), key=rank)
        self._num_routed[chosen] = self._num_routed.get(chosen, 0) + 1
        for prefix in prefixes:
            self._write(prefix, self._holders(prefix) | 1 << chosen)
        return chosen

    def forget(self, engine: int) -> None:
        """It has been started again, with an empty cache."""
        for slot in range(1, NUM_CELLS, 2):
            if holders := int(self._table[slot]):
                self._table[slot] = holders & ~(1 << engine)

    def _prefixes(self, request: Request) -> Iterator[int]:
        """A number for the prompt's first block, its first two, and so on."""
        num_bytes = self._block_size * request.prompt_ids.itemsize
        num_blocks = min(len(request.prompt_ids) // self._block_size, _MAX_BLOCKS)
        data = memoryview(request.prompt_ids[: num_blocks * self._block_size].tobytes())
        prefix = crc32("\0".join(request.cache_keys).encode())
        for start in range(0, len(data), num_bytes):
            prefix = crc32(data[start : start + num_bytes], prefix)
            yield prefix

    def _matched(self, prefixes: list[int]) -> dict[int, int]:
        """Engine -> blocks of the longest prefix that went there."""
        matched: dict[int, int] = {}
        holders = (1 << MAX_ENGINES) - 1
        for number, prefix in enumerate(prefixes, start=1):
            holders &= self._holders(prefix)
            if not holders:
                break
            for engine in range(holders.bit_length()):
                if holders >> engine & 1:
                    matched[engine] = number
        return matched

    def _holders(self, prefix: int) -> int:
        slot = 2 * (prefix % _NUM_SLOTS)
        return int(self._table[slot + 1]) if self._table[slot] == prefix else 0

    def _write(self, prefix: int, holders: int) -> None:
        slot = 2 * (prefix % _NUM_SLOTS)
        self._table[slot], self._table[slot + 1] = prefix, holders
