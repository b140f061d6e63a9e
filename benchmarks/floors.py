"""Floors of a row of the table; how they are computed is `penstock.bench.floors`."""

from collections.abc import Mapping

from shapes import Row

from penstock.bench import floors
from penstock.bench.floors import H200, Floors, Matrix

__all__ = ["H200", "Floors", "Matrix", "floors_of"]


def floors_of(row: Row, touched: Mapping[int, float] | None = None) -> Floors:
    return floors.floors_of(
        row.config,
        has_fp8_cache=row.has_fp8_cache,
        max_running=row.max_running,
        touched=touched,
    )
