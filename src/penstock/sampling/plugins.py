"""Logits processors of other packages, by the names of their entry points.

Code that a request can name runs only where the setting `logits_processors` lists it.
"""

# L rows of logits, P rows that ask, V vocabulary

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from penstock import log
from penstock.config.entry_points import load_entry_point
from penstock.kernels.transfer import to_device
from penstock.sampling.stage import Stage, StepRows
from penstock.sampling.state import SamplingFlags, SamplingState
from penstock.types.sampling import LOGITS_PROCESSORS
from penstock.types.step import LateInputs, RowJoin

_log = log.get(__name__)


class LogitsProcessor(Protocol):
    """What an entry point makes when it is called with (vocab_size, device). A row is the place of
    one running request; another request that takes it begins with `join`."""

    def join(
        self, row: int, args: Mapping[str, Any], prompt_ids: list[int], output_ids: list[int]
    ) -> None:
        """A request takes the row; `output_ids` where it was preempted before."""

    def apply(self, logits_PV: Tensor, rows: list[int]) -> None:
        """Change the logits (fp32, on the device) of these rows in place."""

    def on_tokens(self, rows: list[int], token_ids_P: Tensor) -> None:
        """The rows have these new tokens."""


def load(names: Sequence[str], state: SamplingState) -> tuple[Stage, ...]:
    """The stages of the entry points called so."""
    makers = {
        name: load_entry_point(LOGITS_PROCESSORS, name, "logits_processors") for name in names
    }
    return tuple(
        Plugin(name, make(state.vocab_size, state.device), state) for name, make in makers.items()
    )


class Plugin(Stage):
    """A row whose processor raises ends its request, and no other: its logits become NaN."""

    def __init__(self, name: str, processor: LogitsProcessor, state: SamplingState) -> None:
        self._name = name
        self._processor = processor
        self._state = state
        self._is_sound: dict[int, bool] = {}  # the rows that ask; False: it has raised

    def join(self, joins: Sequence[RowJoin]) -> None:
        for join in joins:
            self._is_sound.pop(join.row, None)
            args = join.sampling.logits_processors.get(self._name)
            if args is None:
                continue
            ids, num_prompt = join.token_ids.tolist(), join.num_prompt
            self._is_sound[join.row] = True
            known = join.row, args, ids[:num_prompt], ids[num_prompt:]
            self._try([join.row], self._processor.join, *known)

    def is_wanted(self, flags: SamplingFlags, late: LateInputs) -> bool:
        return bool(flags & SamplingFlags.PLUGINS) and bool(self._is_sound)

    def apply(self, logits_LV: Tensor, rows: StepRows, late: LateInputs) -> None:
        positions_P, mine = self._sound(rows)
        if mine:
            logits_PV = logits_LV.index_select(0, positions_P)
            self._try(mine, self._processor.apply, logits_PV, mine)
            logits_LV.index_copy_(0, positions_P, logits_PV)
        for position, row in enumerate(rows.rows.tolist()):
            if self._is_sound.get(row) is False:
                logits_LV[position] = torch.nan

    def on_commit(self, rows: StepRows, token_ids_L: Tensor) -> None:
        positions_P, mine = self._sound(rows)
        if mine:
            self._try(mine, self._processor.on_tokens, mine, token_ids_L[positions_P])

    def _sound(self, rows: StepRows) -> tuple[Tensor, list[int]]:
        """Where in the step the rows stand that ask, and which they are."""
        positions = np.flatnonzero([self._is_sound.get(row, False) for row in rows.rows.tolist()])
        return to_device(positions, self._state.device), rows.rows[positions].tolist()

    def _try(self, rows: Sequence[int], call: Callable[..., None], *args: Any) -> None:
        try:
            call(*args)
        except Exception:
            _log.exception("the logits processor '%s' has failed", self._name)
            self._is_sound |= dict.fromkeys(rows, False)
