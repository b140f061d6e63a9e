"""How context-parallel ranks share the prompt tokens of a step (zig-zag)."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens [start, end) of a chunk."""

    chunk: int
    start: int
    end: int

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


def zigzag(lens: Sequence[int], num_ranks: int) -> list[list[Run]]:
    """Each rank's runs of chunks with `lens` tokens, in order.

    A chunk falls into 2 R runs, of which rank r has the r-th and the r-th last: the later a token,
    the more keys it sees, and so all ranks see as many. The numbers of tokens that ranks have
    differ by one at most.
    """
    runs: list[list[Run]] = [[] for _ in range(num_ranks)]
    num_dealt = 0  # of the tokens that runs of equal size leave over
    for chunk, length in enumerate(lens):
        size, num_left = divmod(length, 2 * num_ranks)
        sizes = [size] * (2 * num_ranks)
        for turn in range(num_left):
            rank = (num_dealt + turn) % num_ranks
            sizes[rank if turn < num_ranks else -1 - rank] += 1
        num_dealt += num_left
        ends = list(itertools.accumulate(sizes))
        for rank in range(num_ranks):
            for at in (rank, 2 * num_ranks - 1 - rank):
                if sizes[at]:
                    runs[rank].append(Run(chunk, ends[at] - sizes[at], ends[at]))
    return runs
