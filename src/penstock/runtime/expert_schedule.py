"""`BalanceSchedule`: when which layer of experts gets other slots, by the load that was measured.

Numbers only. Every rank asks the same before each step and is told the same: none has to wait for
another's word.
"""

# L layers of experts, E experts, S slots

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.types.expert_slots import balanced_slots, imbalance

STEPS_BETWEEN = 16  # from one measurement to the next, where no layer waits for its turn
STEPS_LATE = 4  # what is measured has reached the host by then, and nobody waits
_TOLERATED = 1.05  # busiest rank over the mean: moving experts for less is not worth it
_KEPT = 0.5  # of the load before, when a measurement comes


@dataclass(frozen=True, slots=True)
class SlotChange:
    layer: int  # of those that have experts
    experts_S: tuple[int, ...]


class BalanceSchedule:
    def __init__(
        self,
        experts_LS: Sequence[tuple[int, ...]],
        num_experts: int,
        num_ranks: int,
        layer_updates: int,
        start: Callable[[], None],
        read: Callable[[], list[list[int]]],
    ) -> None:
        """`start` measures; `read` gives all tokens of the experts of each layer until then."""
        self._experts_LS, self._num_ranks = list(experts_LS), num_ranks
        self._layer_updates, self._start, self._read = layer_updates, start, read
        self._totals_LE = [[0] * num_experts for _ in experts_LS]
        self._loads_LE = [[0.0] * num_experts for _ in experts_LS]  # lately
        self._num_steps = 0
        self._measured_at: int | None = None  # and not yet read
        self._waiting: list[int] = []  # layers, the worst one last

    def next_step(self) -> list[SlotChange]:
        """What changes in front of it."""
        self._num_steps += 1
        if self._measured_at is not None:
            if self._num_steps - self._measured_at >= STEPS_LATE:
                self._measured_at = None
                self._take(self._read())
        elif not self._waiting and self._num_steps % STEPS_BETWEEN == 0:
            self._measured_at = self._num_steps
            self._start()
        turns = min(self._layer_updates, len(self._waiting))
        changes = [self._changed(self._waiting.pop()) for _ in range(turns)]
        return [change for change in changes if change is not None]

    def _take(self, totals_LE: list[list[int]]) -> None:
        for layer, (now_E, then_E) in enumerate(zip(totals_LE, self._totals_LE, strict=True)):
            self._loads_LE[layer] = [
                _KEPT * load + now - then
                for load, now, then in zip(self._loads_LE[layer], now_E, then_E, strict=True)
            ]
        self._totals_LE = totals_LE
        found = [self._imbalance(layer, slots) for layer, slots in enumerate(self._experts_LS)]
        worst = sorted(range(len(found)), key=lambda layer: (found[layer], -layer))
        self._waiting = [layer for layer in worst if found[layer] > _TOLERATED]

    def _changed(self, layer: int) -> SlotChange | None:
        current = self._experts_LS[layer]
        best = balanced_slots(self._loads_LE[layer], len(current), self._num_ranks, current)
        if self._imbalance(layer, best) >= self._imbalance(layer, current):
            return None
        self._experts_LS[layer] = best
        return SlotChange(layer, best)

    def _imbalance(self, layer: int, experts_S: Sequence[int]) -> float:
        return imbalance(self._loads_LE[layer], experts_S, self._num_ranks)


def moves(before_S: Sequence[int], after_S: Sequence[int]) -> list[tuple[int, int]]:
    """(slot that has the expert, slot that gets it). Several slots that have one take turns, so
    that no rank sends it to all."""
    holders: dict[int, list[int]] = {}
    for slot, expert in enumerate(before_S):
        holders.setdefault(expert, []).append(slot)
    found = []
    for slot, expert in enumerate(after_S):
        if before_S[slot] != expert:
            holder = holders[expert].pop(0)
            holders[expert].append(holder)
            found.append((holder, slot))
    return found
