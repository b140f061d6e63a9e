"""`StepCosts`: how long steps of decodes take, with and without drafted tokens."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Float64s = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Seconds of a step by its number of decodes, which ascend, one at least.

    `plain`: the drafter rests. `keeping_up`: it keeps up with the text and drafts nothing.
    `drafting`: it drafts `max_drafts` tokens behind each decode, none is fed. `single`: one decode
    feeds one of them. `full`: each decode feeds as many.
    """

    max_drafts: int
    decodes: tuple[int, ...]
    plain: tuple[float, ...]
    keeping_up: tuple[float, ...]
    drafting: tuple[float, ...]
    single: tuple[float, ...]
    full: tuple[float, ...]

    def plain_seconds(self, num_decodes: int) -> float:
        return self._at(self.plain, num_decodes)

    def seconds(self, num_decodes: int, num_passes: int, num_fed: NDArray[np.int64]) -> Float64s:
        """Of steps whose decodes feed so many drafts in all, and are drafted `num_passes` each for
        the next."""
        keeping_up, drafting, single, full = (
            self._at(column, num_decodes)
            for column in (self.keeping_up, self.drafting, self.single, self.full)
        )
        per_pass = (drafting - keeping_up) / self.max_drafts
        # A step that feeds any draft is another one: more to launch, a GEMM of one more tile.
        per_further = (full - single) / max(1, num_decodes * self.max_drafts - 1)
        of_fed = (single - drafting) * (num_fed > 0) + per_further * np.maximum(num_fed - 1, 0)
        return of_fed + (keeping_up + num_passes * per_pass)

    def _at(self, column: tuple[float, ...], num_decodes: int) -> float:
        """Between two numbers of decodes and behind the last along a line."""
        last = len(column) - 1
        if last == 0:
            return column[0]
        above = next((i for i in range(1, last) if self.decodes[i] >= num_decodes), last)
        (x0, x1), (y0, y1) = self.decodes[above - 1 : above + 1], column[above - 1 : above + 1]
        return max(y0 + (y1 - y0) * (num_decodes - x0) / (x1 - x0), min(y0, y1))
