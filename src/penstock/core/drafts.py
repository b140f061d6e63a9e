"""`DraftsPerDecode`: how many drafted tokens each decode of a step feeds, so that time is gained.

A decode that feeds k drafts gives 1 + s1 + ... + sk tokens, where sj is how often the first j are
right: of this sequence by what was seen of it lately, and of all where it has shown little. A step
takes as long as was measured at start. The drafts that give most tokens per second are fed, which
may be none; where it stays at none the drafter rests. Where none could pay, were all of them right,
prompts pass it by, too.
"""

# N decodes of a step, R places for sequences, K most drafts

from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np

from penstock.core.sequence import Sequence
from penstock.types.step import StepPlan, StepResult
from penstock.types.step_costs import StepCosts

_FIRST_GUESS, _GUESSED = 0.8, 4.0  # of drafts that are right, and decodes that the guess counts for
_MOST_SEEN = 50.0  # decodes in the mean of all: older ones count for less
_OWN_DECAY = 0.98  # by decode, of what a sequence has shown
_UNSEEN_DECAY = 0.99  # where it is not drafted for beside others that are
_PRIOR = 16.0  # decodes that the mean of all counts for, beside a sequence's own
_PEAK_DECAY = 0.99  # by step, of the most decodes
_LEAST_GAIN = 1.03  # measured times are not exact
_KEPT_STEPS = 8  # that a choice holds for, with the same sequences
# Where drafting does not pay a drafter keeps up with the text for a while, and then rests. A few
# steps in so many draft one token: text changes.
_PATIENCE, _PROBE_PERIOD, _PROBE_STEPS = 16, 128, 3


class Lengths(NamedTuple):
    each: Seq[int]  # drafts of each decode
    most: int  # to draft behind the step
    is_followed: bool  # the drafter keeps up
    takes_prompts: bool = True  # and anyway where the step has prompts


class DraftsPerDecode:
    """`costs` None: always the most, in steps of up to `max_decodes`."""

    def __init__(
        self, most: int, max_decodes: float, costs: StepCosts | None, num_rows: int, num_ranks: int
    ) -> None:
        """`num_rows`: of each data-parallel rank."""
        self._most, self._max_decodes, self.costs = most, max_decodes, costs
        self._num_rows, num_places = num_rows, num_rows * num_ranks
        # Of each place: how often its draft is right where those before it are.
        self._right_K = np.full(most, _FIRST_GUESS)
        self._seen_K = np.full(most, _GUESSED)  # in how many decodes
        self._owners: list[tuple[int, int] | None] = [None] * num_places
        self._own_right_RK = np.zeros((num_places, most))
        self._own_seen_RK = np.zeros((num_places, most))
        self._has_holes_R = np.zeros(num_places, bool)  # tokens that the drafter has not followed
        self._passes = [k for k in (1, 2, 3, 4, 6, 8, 12, 16, 24) if k < most] + [most]
        # As many decodes as steps had lately, at first as many as there may be.
        self._peak = float(num_places)
        self._hopes = [] if costs is None else [num for num in costs.decodes if self._may_pay(num)]
        self._num_refused = self._age = 0
        self._chosen: tuple[list[int], list[int]] = ([], [])  # for which places, and how many

    def of(self, decodes: Seq[Sequence]) -> Lengths:
        """Of the sequences that a step decodes."""
        num = len(decodes)
        if num > self._max_decodes:
            return self._refuse(num)
        if self.costs is None or not self._most:
            return Lengths([self._most] * num, self._most, True)
        self._peak = max(num, self._peak * _PEAK_DECAY) if num else self._peak
        if not self._hopes or self._hopes[0] > self._peak:  # were all drafts right, they would lose
            return Lengths([0] * num, 0, False, False)
        if not num:  # behind prompts
            return Lengths([], 0 if self._num_refused else self._most, True)
        self._age += 1
        places = self._places(decodes)
        if places != self._chosen[0] or self._age >= _KEPT_STEPS:
            self._chosen, self._age = (places, self._best(places)), 0
        each = self._chosen[1]
        if most := max(each):
            self._num_refused = 0
            return Lengths(each, most, True)
        return self._probe(places) or self._refuse(num)

    def _refuse(self, num_decodes: int) -> Lengths:
        self._num_refused += 1
        is_followed = self.costs is None or self._num_refused <= _PATIENCE
        return Lengths([0] * num_decodes, 0, is_followed)

    def _probe(self, places: list[int]) -> Lengths | None:
        """Sequences that the drafter knows all of try one draft, when it is time to."""
        if self._num_refused < _PROBE_PERIOD - _PROBE_STEPS:
            return None
        each = (~self._has_holes_R[places]).astype(int).tolist()
        if not any(each):
            return None
        self._num_refused += 1
        if self._num_refused >= _PROBE_PERIOD:
            self._num_refused = _PATIENCE + 1
        return Lengths(each, 1, True)

    def _may_pay(self, num_decodes: int) -> bool:
        """Whether there is a number of drafts that pays where all of them are right."""
        assert self.costs is not None
        plain = _LEAST_GAIN / self.costs.plain_seconds(num_decodes)
        return any(
            (1 + passes) / self.costs.seconds(num_decodes, passes, np.array([num_decodes * passes]))
            > plain
            for passes in self._passes
        )

    def _places(self, decodes: Seq[Sequence]) -> list[int]:
        """Where what is known of each is kept."""
        places = []
        for seq in decodes:
            place, owner = seq.dp_rank * self._num_rows + seq.row, (seq.id, seq.epoch)
            if self._owners[place] != owner:
                self._owners[place] = owner
                self._own_right_RK[place] = self._own_seen_RK[place] = 0.0
                self._age = _KEPT_STEPS
            places.append(place)
        return places

    def _best(self, places: list[int]) -> list[int]:
        assert self.costs is not None
        num = len(places)
        right_NK = self._own_right_RK[places] + _PRIOR * self._right_K
        kept_NK = (right_NK / (self._own_seen_RK[places] + _PRIOR)).cumprod(axis=1)
        best_rate = _LEAST_GAIN * num / self.costs.plain_seconds(num)
        best = [0] * num
        for passes in self._passes:
            kept_NP = kept_NK[:, :passes]
            gains = np.sort(kept_NP, axis=None)[::-1]  # of a sequence the first draft's is largest
            num_fed = np.arange(1, len(gains) + 1)
            rates = (num + gains.cumsum()) / self.costs.seconds(num, passes, num_fed)
            at = int(rates.argmax())
            if rates[at] > best_rate:
                best_rate, best = float(rates[at]), (kept_NP >= gains[at]).sum(axis=1).tolist()
        return best

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        """A step has ended: which drafts were right."""
        if result.error is not None or not self._most:
            return
        for join in plan.joins:
            self._has_holes_R[join.dp_rank * self._num_rows + join.row] = False
        places = plan.dp_ranks * self._num_rows + plan.rows
        if not plan.is_followed:
            self._has_holes_R[places] = True
        decodes = slice(plan.num_decodes)
        places = places[decodes]
        if not plan.has_drafts:
            return
        num_fed_N1 = plan.num_tokens[decodes, None] - 1
        num_right_N1 = result.num_accepted[decodes, None] - 1
        drafts_K = np.arange(self._most)
        was_due_NK = (num_fed_N1 > drafts_K) & (num_right_N1 >= drafts_K)
        was_right_NK = was_due_NK & (num_right_N1 > drafts_K)
        decay_N1 = np.where(num_fed_N1 > 0, _OWN_DECAY, _UNSEEN_DECAY)
        self._own_right_RK[places] = self._own_right_RK[places] * decay_N1 + was_right_NK
        self._own_seen_RK[places] = self._own_seen_RK[places] * decay_N1 + was_due_NK
        is_whole_N1 = ~self._has_holes_R[places, None]
        num_due_K = (was_due_NK & is_whole_N1).sum(0)
        num_right_K = (was_right_NK & is_whole_N1).sum(0)
        seen_K = self._seen_K + num_due_K
        self._right_K = (self._right_K * self._seen_K + num_right_K) / seen_K
        self._seen_K = np.minimum(seen_K, _MOST_SEEN)
