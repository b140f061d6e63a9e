"""`TokenGraphs`: what a drafter runs for one token of each of some rows, captured by their number.

What the tokens are lies on the device, so inputs are copied there, not from the host.
"""

# S tokens of a captured size, N of a call, 4 a token: row, position, id, where its blocks end

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from penstock.runtime.graphs import CapturedCall, GraphPool, captured_size
from penstock.runtime.input_batch import Rows

TokenRun = Callable[..., tuple[Tensor, ...]]
"""From tokens_S4, and what else it takes of each token; gives what it gives of each."""


def tokens_of(rows_N: Tensor, positions_N: Tensor, ids_N: Tensor, ends_N: Tensor) -> Tensor:
    return torch.stack((rows_N.long(), positions_N, ids_N, ends_N), dim=1)


def columns(tokens_N4: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows, positions, ids and ends, each of its own memory."""
    rows_N, positions_N, ids_N, ends_N = (one.contiguous() for one in tokens_N4.unbind(1))
    return rows_N, positions_N, ids_N, ends_N


def advance(tokens_S4: Tensor, drafts_S: Tensor) -> Tensor:
    """The drafts become the tokens, in place; negative ones stand where no block is, or no draft
    before."""
    is_there_S = (tokens_S4[:, 1] < tokens_S4[:, 3]) & (tokens_S4[:, 2] >= 0)
    drafts_S = torch.where(is_there_S, drafts_S, -1)
    tokens_S4[:, 1] += 1
    tokens_S4[:, 2] = drafts_S
    return drafts_S


class TokenGraphs:
    def __init__(
        self, run: TokenRun, sizes: tuple[int, ...], may_pad: bool, rows: Rows, *widths: int
    ) -> None:
        """`widths`: of what it takes beside the tokens, in the dtype that `capture` is given."""
        self._run, self._may_pad, self._widths = run, may_pad, widths
        self._sizes = np.array(sorted(sizes), np.int64)
        padding = torch.tensor([rows.padding_row, 0, 0, 1], device=rows.device)
        self._padding_4 = padding
        self._captured: dict[int, CapturedCall] = {}

    def capture(self, pool: GraphPool, dtype: torch.dtype) -> None:
        device = self._padding_4.device
        for size in self._sizes[::-1].tolist():
            tokens_S4 = self._padding_4.repeat(size, 1)
            others = [torch.zeros(size, w, dtype=dtype, device=device) for w in self._widths]
            self._captured[size] = pool.capture_call(self._run, (tokens_S4, *others))

    def fits(self, num_tokens: int) -> bool:
        return self._padded(num_tokens) is not None

    def __call__(self, tokens_N4: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        """The next call overwrites what it returns, in stream order."""
        count = len(tokens_N4)
        size = self._padded(count)
        assert size is not None
        captured = self._captured[size]
        for kept, given in zip(captured.inputs, (tokens_N4, *others), strict=True):
            kept[:count].copy_(given)
        captured.inputs[0][count:] = self._padding_4
        return tuple(one[:count] for one in captured.replay())

    def again(self, count: int) -> tuple[Tensor, ...]:
        """Of as many, with what the last call has left in its inputs."""
        size = self._padded(count)
        assert size is not None
        return tuple(one[:count] for one in self._captured[size].replay())

    def _padded(self, count: int) -> int | None:
        return captured_size(self._sizes, count, self._may_pad)
