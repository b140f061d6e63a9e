"""Stages that forbid tokens by rules a request brings: the only tokens it may have, words it must
not write.

Legend: L rows of logits, P rows that ask, R device rows, V vocabulary, W words of 32 bits, B bad
words of a row, H tokens before the last one of a bad word, N entries, K drafts.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.sampling import apply_bitmask
from penstock.kernels.transfer import to_device
from penstock.sampling.stage import Stage, StepRows
from penstock.sampling.state import SamplingFlags, SamplingState
from penstock.sampling.verification import verify
from penstock.types.sampling import MAX_BAD_WORD_TOKENS
from penstock.types.step import LateInputs, RowJoin

_NUM_BEFORE = MAX_BAD_WORD_TOKENS - 1
_ANY, _NEVER = -1, -2  # stand for a token of a word: any one, none
_NOTHING = -3  # before the first token of a row
_MIN_WORDS = 4  # of the table; it doubles when a request brings more


class AllowedTokens(Stage):
    """`allowed_token_ids`, as one bitmask a row."""

    def __init__(self, state: SamplingState) -> None:
        self._state = state
        self._masks: dict[int, Tensor] = {}  # by row

    def join(self, joins: Sequence[RowJoin]) -> None:
        for join in joins:
            self._masks.pop(join.row, None)
            if join.sampling.allowed_token_ids:
                self._masks[join.row] = self._mask(join.sampling.allowed_token_ids)

    def _mask(self, token_ids: Sequence[int]) -> Tensor:
        num_words = -(-self._state.vocab_size // 32)
        bits = np.zeros(num_words * 32, np.uint8)
        bits[[one for one in token_ids if 0 <= one < self._state.vocab_size]] = 1
        words_W = np.packbits(bits, bitorder="little").view("<i4")
        return to_device(words_W, self._state.device)

    def is_wanted(self, flags: SamplingFlags, late: LateInputs) -> bool:
        return bool(flags & SamplingFlags.ALLOWED)

    def apply(self, logits_LV: Tensor, rows: StepRows, late: LateInputs) -> None:
        positions = self._state.positions(rows.rows, SamplingFlags.ALLOWED)
        words_PW = torch.stack([self._masks[row] for row in rows.rows[positions].tolist()])
        positions_P = to_device(positions.astype(np.int32), self._state.device)
        apply_bitmask(logits_LV, positions_P, words_PW)


class BadWords(Stage):
    """`bad_words` as ids: where a row's last tokens are all but the last one of a word, that one is
    forbidden. Its state is the last tokens of each row."""

    def __init__(self, state: SamplingState) -> None:
        self._device = state.device
        self._rows: set[int] = set()  # that have words
        num_rows = len(state.flags_R)
        self._befores_RBH = self._table(num_rows, _MIN_WORDS, _NUM_BEFORE, fill=_NEVER)
        self._lasts_RB = self._table(num_rows, _MIN_WORDS, fill=0)
        self._tails_RH = self._table(num_rows, _NUM_BEFORE, fill=_NOTHING)

    def _table(self, *shape: int, fill: int) -> Tensor:
        return torch.full(shape, fill, dtype=torch.int64, device=self._device)

    def join(self, joins: Sequence[RowJoin]) -> None:
        for join in joins:
            words = join.sampling.bad_words_token_ids
            if not words:
                if join.row in self._rows:
                    self._rows.remove(join.row)
                    self._befores_RBH[join.row] = _NEVER
                continue
            self._rows.add(join.row)
            self._grow(len(words))
            befores_BH = np.full(self._befores_RBH.shape[1:], _NEVER, np.int64)
            lasts_B = np.zeros(len(befores_BH), np.int64)
            for i, word in enumerate(words):
                befores_BH[i] = [_ANY] * (_NUM_BEFORE - len(word) + 1) + list(word[:-1])
                lasts_B[i] = word[-1]
            tail = join.token_ids[-_NUM_BEFORE:].tolist()
            tail_H = np.array([_NOTHING] * (_NUM_BEFORE - len(tail)) + tail, np.int64)
            self._befores_RBH[join.row] = to_device(befores_BH, self._device)
            self._lasts_RB[join.row] = to_device(lasts_B, self._device)
            self._tails_RH[join.row] = to_device(tail_H, self._device)

    def _grow(self, num_words: int) -> None:
        extra = (1 << (num_words - 1).bit_length()) - self._lasts_RB.shape[1]
        if extra > 0:
            pad = torch.nn.functional.pad
            self._befores_RBH = pad(self._befores_RBH, (0, 0, 0, extra), value=_NEVER)
            self._lasts_RB = pad(self._lasts_RB, (0, extra))

    def is_wanted(self, flags: SamplingFlags, late: LateInputs) -> bool:
        return bool(flags & SamplingFlags.BAD_WORDS)

    def apply(self, logits_LV: Tensor, rows: StepRows, late: LateInputs) -> None:
        tails_LH = self._tails_RH.index_select(0, rows.rows_L)
        if rows.drafted is not None:  # as if the drafts that a row was fed had been accepted
            drafts_LK, is_fed_LK = rows.drafted.earlier_drafts()
            tails_LH = _windows(torch.cat((tails_LH, drafts_LK), 1), is_fed_LK.sum(1))
        befores_LBH = self._befores_RBH.index_select(0, rows.rows_L)
        is_next_LBH = (befores_LBH == tails_LH[:, None]) | (befores_LBH == _ANY)
        values_LB = torch.where(is_next_LBH.all(2), -torch.inf, 0.0)
        logits_LV.scatter_add_(1, self._lasts_RB.index_select(0, rows.rows_L), values_LB)

    def on_commit(self, rows: StepRows, token_ids_L: Tensor) -> None:
        if rows.drafted is None:
            tails_LH = self._tails_RH.index_select(0, rows.rows_L)
            tails_LH = torch.cat((tails_LH[:, 1:], token_ids_L[:, None]), 1)
            self._tails_RH.index_copy_(0, rows.rows_L, tails_LH)
            return
        rows_N = rows.rows_L[rows.drafted.firsts()]
        accepted = verify(token_ids_L, rows.drafted)
        tails_NH = torch.cat((self._tails_RH.index_select(0, rows_N), accepted.token_ids_NW), 1)
        self._tails_RH.index_copy_(0, rows_N, _windows(tails_NH, accepted.num_accepted_N))


def _windows(tokens: Tensor, num_new_N: Tensor) -> Tensor:
    """The last tokens of each row, of which so many are new."""
    places_H = torch.arange(_NUM_BEFORE, device=tokens.device)
    return tokens.gather(1, num_new_N[:, None] + places_H)
