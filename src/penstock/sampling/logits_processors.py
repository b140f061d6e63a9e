"""Logits processors and sampling filters, between the model's logits and the draw, in their order.

Processors change logits (in place, fp32): logit bias, min_tokens, penalties. Filters only bound the
draw: top-k, top-p and min-p become one threshold, the smallest logit a row may draw. Temperature
belongs to the draw. Each runs when one row of the step asks for it and is neutral to the others.

Legend: L rows of logits, V vocabulary, W values of a sparse row, P rows with a filter.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.sampling import apply_penalties, filter_thresholds
from penstock.kernels.transfer import to_device
from penstock.sampling.state import (
    FILTERS,
    RowParams,
    SamplingFlags,
    SamplingState,
    SparseRows,
)
from penstock.sampling.verification import DraftedRows


def process(
    logits_LV: Tensor,
    rows_L: Tensor,
    indices_L: Tensor,
    params: RowParams,
    flags: SamplingFlags,
    state: SamplingState,
    drafted: DraftedRows | None = None,
) -> Tensor:
    """A new fp32 tensor: the logits after bias, min_tokens and penalties."""
    logits_LV = logits_LV.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    if flags & SamplingFlags.BIAS:
        _add(logits_LV, rows_L, state.biases)
    if flags & SamplingFlags.MIN_TOKENS:
        _add(logits_LV, rows_L, state.stops, where_L=indices_L < params("min_length"))
    if flags & SamplingFlags.PENALTIES:
        slots_L, seen = params("slot"), (state.seen.in_prompt_SV, state.seen.output_counts_SV)
        if drafted is not None:
            seen = state.seen.with_drafts(slots_L, drafted)
            slots_L = torch.arange(len(slots_L), device=slots_L.device)
        apply_penalties(
            logits_LV,
            slots_L,
            *seen,
            params("repetition"),
            params("presence"),
            params("frequency"),
        )
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
