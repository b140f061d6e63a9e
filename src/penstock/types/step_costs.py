"""`StepCosts`: how long steps of decodes take, with and without drafted tokens."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Seconds of a step by its number of decodes, which ascend, one at least.

    `plain`: nothing is drafted. `drafting`: tokens are drafted behind it, none is fed. `full`: each
    decode feeds `max_drafts` of them, too.
    """

    max_drafts: int
    decodes: tuple[int, ...]
    plain: tuple[float, ...]
    drafting: tuple[float, ...]
    full: tuple[float, ...]

    def seconds(self, num_decodes: int, num_drafts: int) -> float:
        """Of a step whose decodes feed `num_drafts` each and are drafted as many for the next."""
        if num_drafts == 0:
            return self._at(self.plain, num_decodes)
        share = num_drafts / self.max_drafts
        plain, drafting, full = (
            self._at(column, num_decodes) for column in (self.plain, self.drafting, self.full)
        )
        return plain + share * (drafting - plain) + share * (full - drafting)

    def _at(self, column: tuple[float, ...], num_decodes: int) -> float:
        """Between two numbers of decodes and behind the last along a line."""
        last = len(column) - 1
        if last == 0:
            return column[0]
        above = next((i for i in range(1, last) if self.decodes[i] >= num_decodes), last)
        (x0, x1), (y0, y1) = self.decodes[above - 1 : above + 1], column[above - 1 : above + 1]
        return max(y0 + (y1 - y0) * (num_decodes - x0) / (x1 - x0), min(y0, y1))
