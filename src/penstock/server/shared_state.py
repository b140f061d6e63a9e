"""`SharedState`: what the API servers of one server know of each other, in memory they share.

Each has a row: its counters, and what each tenant holds open through it. They say nothing else to
one another; everything about the engine they hear from the engine.
"""

from collections.abc import Sequence
from typing import Self

from penstock.frontend.capacity import Holdings
from penstock.ipc.shared import Row, create_table, open_table
from penstock.metrics.collect import NUM_CELLS

_ENGINE_ENDED, _END_REQUESTS, _METRICS = range(3)
_HOLDINGS = _METRICS + NUM_CELLS


class SharedState:
    def __init__(self, path: str, num_api_servers: int, own: int) -> None:
        self.path = path
        self.own = own
        self._rows = open_table(path, num_api_servers)
        num_tenants = (len(self._rows[0]) - _HOLDINGS) // Holdings.num_cells(0) - 1
        self.holdings = Holdings(num_tenants, [row[_HOLDINGS:] for row in self._rows], own)
        self.holdings.forget(own)  # of whoever had this row before

    @classmethod
    def create(cls, path: str, num_api_servers: int, num_tenants: int = 1) -> Self:
        """The first API server's."""
        create_table(path, num_api_servers, _HOLDINGS + Holdings.num_cells(num_tenants))
        return cls(path, num_api_servers, own=0)

    @property
    def num_api_servers(self) -> int:
        return len(self._rows)

    @property
    def metrics(self) -> Sequence[Row]:
        return [row[_METRICS:_HOLDINGS] for row in self._rows]

    def forget(self, index: int) -> None:
        """That API server has ended, and its requests with it; what it counted stays."""
        self.holdings.forget(index)

    def tell_engine_ended(self) -> None:
        self._rows[0][_ENGINE_ENDED] = 1

    def tell_end_requests(self) -> None:
        """Those that still run while the server leaves."""
        self._rows[0][_END_REQUESTS] = 1

    @property
    def must_end_requests(self) -> bool:
        return bool(self._rows[0][_END_REQUESTS])

    @property
    def has_engine_ended(self) -> bool:
        return bool(self._rows[0][_ENGINE_ENDED])
