"""Logits processors and sampling filters, between the model's logits and the draw, in their order.

A processor is a `Stage`: it changes logits (in place, fp32) where a row of the step wants it; they
run in the order of `make_stages`. Filters only bound the draw: top-k, top-p and min-p become one
threshold, the smallest logit a row may draw. Temperature belongs to the draw. Each runs when one
row of the step asks for it and is neutral to the others.

Legend: L rows of logits, V vocabulary, W values of a sparse row, P rows with a filter or a bitmask.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.sampling import apply_bitmask, apply_penalties, filter_thresholds
from penstock.kernels.transfer import to_device
from penstock.sampling.stage import Stage, StepRows
from penstock.sampling.state import (
    FILTERS,
    RowParams,
    SamplingFlags,
    SamplingState,
    SparseRows,
)
from penstock.sampling.token_rules import AllowedTokens, BadWords
from penstock.sampling.verification import verify
from penstock.types.step import LateInputs


class Bias(Stage):
    def __init__(self, state: SamplingState) -> None:
        self._state = state

    def is_wanted(self, flags: SamplingFlags, late: LateInputs) -> bool:
        return bool(flags & SamplingFlags.BIAS)

    def apply(self, logits_LV: Tensor, rows: StepRows, late: LateInputs) -> None:
        _add(logits_LV, rows.rows_L, self._state.biases)


class MinTokens(Stage):
    def __init__(self, state: SamplingState) -> None:
        self._state = state

    def is_wanted(self, flags: SamplingFlags, late: LateInputs) -> bool:
        return bool(flags & SamplingFlags.MIN_TOKENS)

    def apply(self, logits_LV: Tensor, rows: StepRows, late: LateInputs) -> None:
        is_short_L = rows.indices_L < rows.params("min_length")
        _add(logits_LV, rows.rows_L, self._state.stops, where_L=is_short_L)


class Penalties(Stage):
    """Its state is what rows have seen."""

    def __init__(self, state: SamplingState) -> None:
        self._seen = state.seen

    def is_wanted(self, flags: SamplingFlags, late: LateInputs) -> bool:
        return bool(flags & SamplingFlags.PENALTIES)

    def apply(self, logits_LV: Tensor, rows: StepRows, late: LateInputs) -> None:
        slots_L, seen = rows.params("slot"), (self._seen.in_prompt_SV, self._seen.output_counts_SV)
        if rows.drafted is not None:
            seen = self._seen.with_drafts(slots_L, rows.drafted)
            slots_L = torch.arange(len(slots_L), device=slots_L.device)
        apply_penalties(
            logits_LV,
            slots_L,
            *seen,
            rows.params("repetition"),
            rows.params("presence"),
            rows.params("frequency"),
        )

    def on_commit(self, rows: StepRows, token_ids_L: Tensor) -> None:
        if rows.drafted is None:
            self._seen.advance(rows.params("slot"), token_ids_L)
        else:
            firsts_N = rows.drafted.firsts()
            self._seen.advance_accepted(
                rows.params("slot")[firsts_N], verify(token_ids_L, rows.drafted)
            )


class Bitmask(Stage):
    """Tokens that a late input forbids. What they depend on is kept by whoever made the mask."""

    def __init__(self, state: SamplingState) -> None:
        self._device = state.device

    def is_wanted(self, flags: SamplingFlags, late: LateInputs) -> bool:
        return len(late.positions) > 0

    def apply(self, logits_LV: Tensor, rows: StepRows, late: LateInputs) -> None:
        positions_P = to_device(late.positions, self._device)
        apply_bitmask(logits_LV, positions_P, to_device(late.bitmasks, self._device))


def make_stages(state: SamplingState, plugins: Sequence[Stage] = ()) -> tuple[Stage, ...]:
    """In their order. Masks come last: nothing may raise again what they forbid."""
    usual = Bias(state), MinTokens(state), Penalties(state)
    return *usual, *plugins, AllowedTokens(state), BadWords(state), Bitmask(state)


def process(logits_LV: Tensor, rows: StepRows, stages: Sequence[Stage], late: LateInputs) -> Tensor:
    """A new fp32 tensor: the logits after these stages."""
    logits_LV = logits_LV.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    for stage in stages:
        stage.apply(logits_LV, rows, late)
    return logits_LV


def _add(
    logits_LV: Tensor, rows_L: Tensor, sparse: SparseRows, where_L: Tensor | None = None
) -> None:
    """Add each row's own values to its tokens, everywhere or only to some rows."""
    values_LW = sparse.values_RW.index_select(0, rows_L)
    if where_L is not None:
        values_LW = torch.where(where_L[:, None], values_LW, 0.0)
    logits_LV.scatter_add_(1, sparse.ids_RW.index_select(0, rows_L), values_LW)


def thresholds(
    logits_LV: Tensor, rows: NDArray[np.int32], params: RowParams, state: SamplingState
) -> Tensor:
    """The smallest logit each row may draw; -inf for rows that did not ask."""
    positions = state.positions(rows, FILTERS)
    is_for_all = len(positions) == len(rows)
    if not is_for_all:
        positions_P = to_device(positions, state.device)
        logits_LV, params = logits_LV.index_select(0, positions_P), params.select(positions_P)
    thresholds_P = filter_thresholds(
        logits_LV,
        params("temperature"),
        params("top_k"),
        params("top_p"),
        params("min_p"),
        _num_candidates(rows[positions], state, logits_LV.shape[1]),
    )
    if is_for_all:
        return thresholds_P
    thresholds_L = torch.full((len(rows),), -torch.inf, device=state.device)
    return thresholds_L.index_copy_(0, positions_P, thresholds_P)


def _num_candidates(rows: NDArray[np.int32], state: SamplingState, vocab_size: int) -> int:
    top_k_P = state.top_k_R[rows[state.positions(rows, SamplingFlags.TOP)]]
    if (top_k_P == 0).any():
        return vocab_size
    return int(top_k_P.max(initial=1))
