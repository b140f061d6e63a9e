"""`DraftsPerDecode`: how many drafted tokens a decode may feed, so that drafting gains time.

A decode that feeds k drafts gives 1 + s1 + ... + sk tokens, where sj is how often the first j are
right, by what was seen lately; a step of so many decodes takes as long as was measured at start.
The k with most tokens per second is taken, which may be none.
"""

from penstock.types.step import StepPlan, StepResult
from penstock.types.step_costs import StepCosts

_FIRST_GUESS = 0.8  # of drafts that are right, before any was seen
_NEW_WEIGHT = 0.02  # of one decode in the running mean
# Where drafting does not pay, a few steps in so many draft one token: text and load change.
_PROBE_PERIOD, _PROBE_STEPS = 128, 3


class DraftsPerDecode:
    """`costs` None: always the most, in steps of up to `max_decodes`."""

    def __init__(self, most: int, max_decodes: float, costs: StepCosts | None) -> None:
        self._most, self._max_decodes, self._costs = most, max_decodes, costs
        # Of each place: how often its draft is right where those before it are.
        self._right = [_FIRST_GUESS] * most
        self._num_refused = 0

    def most(self, num_decodes: int) -> int:
        """Of each decode of a step with so many; also what is worth drafting behind it."""
        if num_decodes > self._max_decodes:
            return 0
        if self._costs is None or not self._most or not num_decodes:
            return self._most
        num_tokens = kept = 1.0
        best, best_rate = 0, 1.0 / self._costs.seconds(num_decodes, 0)
        for num_drafts, right in enumerate(self._right, start=1):
            kept *= right
            num_tokens += kept
            rate = num_tokens / self._costs.seconds(num_decodes, num_drafts)
            if rate > best_rate:
                best, best_rate = num_drafts, rate
        if best:
            self._num_refused = 0
            return best
        self._num_refused += 1
        return int(self._num_refused % _PROBE_PERIOD >= _PROBE_PERIOD - _PROBE_STEPS)

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        """A step has ended: which drafts were right."""
        if result.error is not None or not plan.has_drafts:
            return
        num_fed = plan.num_tokens[: plan.num_decodes] - 1
        num_right = result.num_accepted[: plan.num_decodes] - 1
        for place in range(self._most):
            was_due = (num_fed > place) & (num_right >= place)
            count = int(was_due.sum())
            if not count:
                return
            share = float((num_right[was_due] > place).mean())
            weight = 1 - (1 - _NEW_WEIGHT) ** count
            self._right[place] += weight * (share - self._right[place])
