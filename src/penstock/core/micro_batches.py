"""`MicroBatches`: which decodes go into one step, where several steps are under way at once.

A sequence has one decode under way. If a step took all that are ready, those of the next steps
would be empty: each takes an equal part, so that every stage of a pipeline has one.
"""

from collections.abc import Sequence as Seq

from penstock.core.sequence import Sequence


class MicroBatches:
    def __init__(self, num_steps: int, num_ranks: int) -> None:
        """`num_steps`: that are under way at once. `num_ranks`: data-parallel ones."""
        self._num_steps, self._num_ranks = num_steps, num_ranks

    def of(self, ready: list[Sequence], running: Seq[Sequence]) -> list[Sequence]:
        """An equal part of each rank's decodes, the first of those that are ready."""
        left = [0] * self._num_ranks
        for seq in running:
            left[seq.dp_rank] += not seq.is_prefilling
        left = [-(-num // self._num_steps) for num in left]
        taken = []
        for seq in ready:
            if left[seq.dp_rank]:
                left[seq.dp_rank] -= 1
                taken.append(seq)
        return taken
