"""`SharedState`: what the API servers of one server know of each other, in memory they share.

Each has a row: its counters, and what each tenant holds open through it. Beside the rows lies the
table of `frontend/routing`. They say nothing else to one another; everything about an engine they
hear from it.
"""

from collections.abc import Sequence
from typing import Self

from penstock.frontend import routing
from penstock.frontend.capacity import Holdings
from penstock.ipc.shared import Row, create_table, open_table
from penstock.metrics.collect import NUM_CELLS

_END_REQUESTS = 0
_ENGINE_ENDS = 1  # a cell for each engine
_METRICS = _ENGINE_ENDS + routing.MAX_ENGINES
_HOLDINGS = _METRICS + NUM_CELLS
_ROUTES = "-routes"


class SharedState:
    def __init__(self, path: str, num_api_servers: int, own: int) -> None:
        self.path = path
        self.own = own
        self._rows = open_table(path, num_api_servers)
        [self.routes] = open_table(path + _ROUTES, 1)  # of all
        num_tenants = (len(self._rows[0]) - _HOLDINGS) // Holdings.num_cells(0) - 1
        self.holdings = Holdings(num_tenants, [row[_HOLDINGS:] for row in self._rows], own)
        self.holdings.forget(own)  # of whoever had this row before

    @classmethod
    def create(cls, path: str, num_api_servers: int, num_tenants: int = 1) -> Self:
        """The first API server's."""
        create_table(path + _ROUTES, 1, routing.NUM_CELLS)
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

    def tell_engine_ended(self, index: int) -> None:
        self._rows[0][_ENGINE_ENDS + index] += 1

    def tell_end_requests(self) -> None:
        """Those that still run while the server leaves."""
        self._rows[0][_END_REQUESTS] = 1

    @property
    def must_end_requests(self) -> bool:
        return bool(self._rows[0][_END_REQUESTS])

    def num_ends(self, index: int) -> int:
        """How often that engine has ended by itself."""
        return int(self._rows[0][_ENGINE_ENDS + index])
