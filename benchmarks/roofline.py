"""Roofline of a row of the table; how it is computed is `penstock.bench.roofline`."""

from collections.abc import Mapping

from shapes import Row

from penstock.bench import roofline as bench_roofline
from penstock.bench.roofline import H200, Matrix, Roofline

__all__ = ["H200", "Matrix", "Roofline", "roofline_of"]


def roofline_of(row: Row, activated: Mapping[int, float] | None = None) -> Roofline:
    return bench_roofline.roofline_of(
        row.config,
        cache="fp8" if row.has_fp8_cache else "auto",
        max_running=row.max_running,
        activated=activated,
    )
