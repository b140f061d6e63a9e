"""Logits -> tokens, one per row, each row by its own parameters. Nothing here waits for the device.

Legend: L rows of logits, V vocabulary, P rows that want log-probabilities, K of so many tokens at
most, 2 a token and whether its logits were finite.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.config.run import RelaxedDrafts
from penstock.kernels.sampling import argmax, gumbel_argmax
from penstock.kernels.transfer import to_device
from penstock.sampling import logits_processors, plugins
from penstock.sampling.logprobs import SampledLogprobs, token_logprobs
from penstock.sampling.relaxed import RelaxedDraws
from penstock.sampling.stage import Stage, StepRows
from penstock.sampling.state import FILTERS, SamplingFlags, SamplingState
from penstock.sampling.verification import DraftedRows
from penstock.types.step import LateInputs, RowJoin

NOT_FINITE = (
    "the model's logits are not finite (NaN or infinity): its weights are damaged, or its numbers "
    "leave the range of the dtype it runs in; fetch the checkpoint again, or set dtype to bfloat16 "
    "or float32"
)


@dataclass(frozen=True, slots=True)
class Sampled:
    drawn_2L: Tensor  # int64, as the ops give it; a row whose second is 0 has no token
    logprobs: SampledLogprobs | None = None

    @property
    def token_ids_L(self) -> Tensor:
        return self.drawn_2L[0]


class Sampler:
    """Owns the sampling state of `max_rows` device rows and one padding row behind them."""

    def __init__(
        self,
        max_rows: int,
        vocab_size: int,
        device: torch.device,
        seed: int,
        plugin_names: Sequence[str] = (),
        relaxed: RelaxedDrafts | None = None,
    ) -> None:
        self._state = SamplingState(max_rows, vocab_size, device, seed)
        loaded = plugins.load(plugin_names, self._state)
        self._stages = logits_processors.make_stages(self._state, loaded)
        self._relaxed = None if relaxed is None else RelaxedDraws(relaxed, max_rows, device)

    def join(self, joins: Sequence[RowJoin]) -> None:
        """Sequences take rows; whatever the rows remembered is gone."""
        self._state.join(joins)
        for stage in self._stages:
            stage.join(joins)
        if self._relaxed is not None:
            self._relaxed.join(joins)

    def sample(
        self,
        logits_LV: Tensor,
        rows: NDArray[np.int32],
        rows_L: Tensor,
        kv_lens_L: Tensor,
        late: LateInputs = LateInputs(),
        drafted: DraftedRows | None = None,
    ) -> Sampled:
        """Draw the next token of each row.

        `rows` (host) and `rows_L` (device) are the same row numbers. `kv_lens_L` is the length of
        each sequence before the new token, so the new token's index. Where tokens were drafted, a
        sequence has several rows of logits, each of which draws; `verify` says which count.
        """
        flags = self._state.flags(rows)
        stages = [stage for stage in self._stages if stage.is_wanted(flags, late)]
        if stages or flags & SamplingFlags.RANDOM:
            step = StepRows(rows, rows_L, kv_lens_L, self._state.params(rows_L), drafted)
            drawn_2L = self._choose(logits_LV, rows, step, flags, stages, late)
        else:
            drawn_2L = self._relax(argmax(logits_LV), logits_LV, rows_L, drafted)
        if flags & SamplingFlags.LOGPROBS:
            return Sampled(drawn_2L, self._logprobs(logits_LV, drawn_2L[0], rows))
        return Sampled(drawn_2L)

    def _choose(
        self,
        logits_LV: Tensor,
        rows: NDArray[np.int32],
        step: StepRows,
        flags: SamplingFlags,
        stages: Sequence[Stage],
        late: LateInputs,
    ) -> Tensor:
        params = step.params
        if stages:
            logits_LV = logits_processors.process(logits_LV, step, stages, late)
        if flags & SamplingFlags.RANDOM:
            thresholds_L = (
                logits_processors.thresholds(logits_LV, rows, params, self._state)
                if flags & FILTERS
                else None
            )
            drawn_2L = gumbel_argmax(
                logits_LV, params("temperature"), params("seed"), step.indices_L, thresholds_L
            )
        else:
            drawn_2L = argmax(logits_LV)
        drawn_2L = self._relax(drawn_2L, logits_LV, step.rows_L, step.drafted)
        for stage in stages:
            stage.on_commit(step, drawn_2L[0])
        return drawn_2L

    def _relax(
        self, drawn_2L: Tensor, logits_LV: Tensor, rows_L: Tensor, drafted: DraftedRows | None
    ) -> Tensor:
        if self._relaxed is not None:
            drawn_2L[0] = self._relaxed.take(drawn_2L[0], logits_LV, rows_L, drafted)
        return drawn_2L

    def _logprobs(
        self, logits_LV: Tensor, token_ids_L: Tensor, rows: NDArray[np.int32]
    ) -> SampledLogprobs:
        positions = self._state.positions(rows, SamplingFlags.LOGPROBS)
        if len(positions) < len(rows):
            positions_P = to_device(positions, self._state.device)
            logits_LV, token_ids_L = logits_LV[positions_P], token_ids_L[positions_P]
        rows_P = rows[positions]
        top_k_P = self._state.num_logprobs_R[rows_P]
        return SampledLogprobs(
            positions=positions,
            top_k=top_k_P,
            tokens=token_logprobs(
                logits_LV, token_ids_L, int(top_k_P.max()), self._named_PK(rows_P, top_k_P)
            ),
        )

    def _named_PK(self, rows_P: NDArray[np.int32], top_k_P: NDArray[np.int32]) -> Tensor | None:
        """Tokens that rows ask about by id, -1 behind them and where a row asks for the best."""
        by_row = self._state.logprob_ids
        named = {j: by_row[row] for j, row in enumerate(rows_P.tolist()) if row in by_row}
        if not named:
            return None
        named_PK = np.full((len(rows_P), int(top_k_P.max())), -1, np.int64)
        for j, ids in named.items():
            named_PK[j, : len(ids)] = ids
        return to_device(named_PK, self._state.device)
