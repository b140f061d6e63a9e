"""`Board`: what the front ends of one server know of each other, in memory they share.

Each has a row: how many requests it holds open, and its counters. They say nothing else to one
another; everything about the engine they hear from the engine.
"""

from collections.abc import Sequence
from typing import Self

from penstock.ipc.shared import Row, create_table, open_table
from penstock.metrics.collect import NUM_CELLS

_OPEN, _ENGINE_ENDED, _METRICS = range(3)


class Board:
    def __init__(self, path: str, num_frontends: int, own: int) -> None:
        self.path = path
        self.own = own
        self._rows = open_table(path, num_frontends)
        self.tell_open(0)  # of whoever had this row before

    @classmethod
    def create(cls, path: str, num_frontends: int) -> Self:
        """The first front end's."""
        create_table(path, num_frontends, _METRICS + NUM_CELLS)
        return cls(path, num_frontends, own=0)

    @property
    def num_frontends(self) -> int:
        return len(self._rows)

    @property
    def metrics(self) -> Sequence[Row]:
        return [row[_METRICS:] for row in self._rows]

    def tell_open(self, num_open: int) -> None:
        self._rows[self.own][_OPEN] = num_open

    def open_elsewhere(self) -> int:
        return int(sum(row[_OPEN] for i, row in enumerate(self._rows) if i != self.own))

    def forget(self, index: int) -> None:
        """That front end has ended, and its requests with it; what it counted stays."""
        self._rows[index][_OPEN] = 0

    def tell_engine_ended(self) -> None:
        self._rows[0][_ENGINE_ENDED] = 1

    @property
    def has_engine_ended(self) -> bool:
        return bool(self._rows[0][_ENGINE_ENDED])
