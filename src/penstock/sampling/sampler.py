"""Logits -> tokens, one per row, each row by its own parameters. Nothing here waits for the device.

Legend: L rows of logits, V vocabulary, P rows that want log-probabilities.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.sampling import argmax, gumbel_argmax
from penstock.kernels.transfer import to_device
from penstock.sampling import stages
from penstock.sampling.logprobs import SampledLogprobs, token_logprobs
from penstock.sampling.state import CUTOFFS, EDITS, Needs, SamplingState
from penstock.types.step import RowJoin


@dataclass(frozen=True, slots=True)
class Sampled:
    token_ids_L: Tensor  # int64
    logprobs: SampledLogprobs | None = None


class Sampler:
    """Owns the sampling state of `max_rows` device rows and one padding row behind them."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device, seed: int) -> None:
        self._state = SamplingState(max_rows, vocab_size, device, seed)

    def join(self, joins: Sequence[RowJoin]) -> None:
        """Sequences take rows; whatever the rows remembered is gone."""
        self._state.join(joins)

    def sample(
        self, logits_LV: Tensor, rows: NDArray[np.int32], rows_L: Tensor, kv_lens_L: Tensor
    ) -> Sampled:
        """Draw the next token of each row.

        `rows` (host) and `rows_L` (device) are the same row numbers. `kv_lens_L` is the length of
        each sequence before the new token, so the new token's index.
        """
        needs = self._state.needs(rows)
        if needs & (EDITS | Needs.RANDOM):
            token_ids_L = self._choose(logits_LV, rows, rows_L, kv_lens_L, needs)
        else:
            token_ids_L = argmax(logits_LV)
        if needs & Needs.LOGPROBS:
            return Sampled(token_ids_L, self._logprobs(logits_LV, token_ids_L, rows))
        return Sampled(token_ids_L)

    def _choose(
        self,
        logits_LV: Tensor,
        rows: NDArray[np.int32],
        rows_L: Tensor,
        indices_L: Tensor,
        needs: Needs,
    ) -> Tensor:
        state = self._state
        params = state.params(rows_L)
        if needs & EDITS:
            logits_LV = stages.edit(logits_LV, rows_L, indices_L, params, needs, state)
        if needs & Needs.RANDOM:
            cutoffs_L = stages.cutoffs(logits_LV, rows, params, state) if needs & CUTOFFS else None
            token_ids_L = gumbel_argmax(
                logits_LV, params("temperature"), params("seed"), indices_L, cutoffs_L
            )
        else:
            token_ids_L = argmax(logits_LV)
        if needs & Needs.PENALTIES:
            state.seen.advance(params("slot"), token_ids_L)
        return token_ids_L

    def _logprobs(
        self, logits_LV: Tensor, token_ids_L: Tensor, rows: NDArray[np.int32]
    ) -> SampledLogprobs:
        positions = self._state.positions(rows, Needs.LOGPROBS)
        if len(positions) < len(rows):
            positions_P = to_device(positions, self._state.device)
            logits_LV, token_ids_L = logits_LV[positions_P], token_ids_L[positions_P]
        top_k = self._state.num_logprobs_R[rows[positions]]
        return SampledLogprobs(
            positions=positions,
            top_k=top_k,
            tokens=token_logprobs(logits_LV, token_ids_L, int(top_k.max())),
        )
