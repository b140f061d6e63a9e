"""Batch fields: what a feature keeps per row and hands to the layers with each step.

`Rows` calls them and knows none of them by name.
"""

from typing import Protocol

from torch import Tensor

from penstock.kernels.forward_batch import ForwardBatch
from penstock.types.step import Int32s, StepPlan


class BatchField(Protocol):
    @property
    def num_bytes(self) -> int:
        """That it holds on the device."""

    def start(self) -> None:
        """Once, before serving: what the settings ask for that may fail."""

    def begin(self, plan: StepPlan) -> None:
        """Before a step: sequences take rows, and whatever the rows held is gone."""

    def is_wanted(self, rows: Int32s) -> bool:
        """Whether the step that has begun takes it, of which these are the rows on this rank. Ranks
        that run it with this one say the same."""

    def attach(self, batch: ForwardBatch, rows_T: Tensor, rows: Int32s | None) -> None:
        """Write the field of a batch whose tokens have these rows. Nothing waits for the device.

        `rows`: all of them, on the host. None: the host does not know them, the batch is captured
        once and serves any. Steps that no field is wanted for have graphs of their own.
        """
