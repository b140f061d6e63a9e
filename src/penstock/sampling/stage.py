"""`Stage`: a logits processor between the model's logits and the draw; `StepRows`, what it sees.

Legend: L rows of logits, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from penstock.sampling.state import RowParams, SamplingFlags
from penstock.sampling.verification import DraftedRows
from penstock.types.step import LateInputs, RowJoin


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of a step's logits: which device rows, on the host and on the device, where their
    new tokens stand, parameters, and where tokens were drafted, which of them belong to one
    sequence."""

    rows: NDArray[np.int32]
    rows_L: Tensor
    indices_L: Tensor
    params: RowParams
    drafted: DraftedRows | None = None


class Stage(ABC):
    def join(self, joins: Sequence[RowJoin]) -> None:  # noqa: B027 - most keep nothing by row
        """Sequences take rows; whatever the rows remembered is gone."""

    @abstractmethod
    def is_wanted(self, flags: SamplingFlags, late: LateInputs) -> bool:
        """Whether a row of the step wants it; `flags` are those of all its rows."""

    @abstractmethod
    def apply(self, logits_LV: Tensor, rows: StepRows, late: LateInputs) -> None: ...

    def on_commit(self, rows: StepRows, token_ids_L: Tensor) -> None:  # noqa: B027 - most keep none
        """The rows have drawn these tokens: for stages that keep state, after each `apply`. On the
        device and before the scheduler's commit; of drafts not all may count."""
