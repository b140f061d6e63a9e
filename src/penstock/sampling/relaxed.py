"""`RelaxedDraws`: a draft that is likely enough takes the place of the token that was drawn.

Asked for by `speculative_config`: more drafts count, and the output is no longer that of the model
alone. Everything behind the draw (verification, log-probabilities, penalties) sees the taken token.

Legend: N entries that sample, W most rows of logits of an entry, L rows of logits, V vocabulary,
R device rows, K most drafts.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from penstock.config.run import RelaxedDrafts, ThinkingDrafts
from penstock.kernels.transfer import to_device
from penstock.sampling.verification import DraftedRows, verify
from penstock.types.step import RowJoin


class RelaxedDraws:
    def __init__(self, asked: RelaxedDrafts, max_rows: int, device: torch.device) -> None:
        self._asked = asked
        self._thinks_R = torch.zeros(max_rows + 1, dtype=torch.bool, device=device)

    def join(self, joins: Sequence[RowJoin]) -> None:
        if not joins or not isinstance(self._asked, ThinkingDrafts):
            return
        rows = np.array([join.row for join in joins])
        thinks = np.array([_thinks(join.token_ids, self._asked) for join in joins])
        self._thinks_R[to_device(rows, self._thinks_R.device)] = to_device(
            thinks, self._thinks_R.device
        )

    def take(
        self, drawn_L: Tensor, logits_LV: Tensor, rows_L: Tensor, drafted: DraftedRows | None
    ) -> Tensor:
        """`drawn_L` with drafts in it. `logits_LV`: what it was drawn from."""
        if drafted is not None:
            drafts_L = drafted.compared()
            is_near_L = self._is_near(logits_LV.float(), drafts_L.clamp(min=0))
            if isinstance(self._asked, ThinkingDrafts):
                earlier_LK, is_fed_LK = drafted.earlier_drafts()
                is_near_L &= self._thinks_behind(earlier_LK, is_fed_LK, rows_L, self._asked)
            drawn_L = torch.where(is_near_L & (drafts_L >= 0), drafts_L, drawn_L)
        if isinstance(self._asked, ThinkingDrafts):
            self._follow(drawn_L, rows_L, drafted, self._asked)
        return drawn_L

    def _is_near(self, logits_LV: Tensor, drafts_L: Tensor) -> Tensor:
        log_probs_LV = logits_LV.log_softmax(-1)
        own_L1 = log_probs_LV.gather(1, drafts_L[:, None])
        if isinstance(self._asked, ThinkingDrafts):
            rank_L = (log_probs_LV > own_L1).sum(1)
            least_L = log_probs_LV.amax(1).exp() - self._asked.delta
            is_likely_L = (own_L1[:, 0] > -torch.inf) & (own_L1[:, 0].exp() >= least_L)
            return is_likely_L & (rank_L < self._asked.top_k)
        entropy_L = -(log_probs_LV.exp() * log_probs_LV.clamp(min=-1e4)).sum(1)
        threshold = self._asked.threshold
        least_L = (threshold**0.5 * (-entropy_L).exp()).clamp(max=threshold)
        return own_L1[:, 0].exp() > least_L

    def _follow(
        self, drawn_L: Tensor, rows_L: Tensor, drafted: DraftedRows | None, asked: ThinkingDrafts
    ) -> None:
        """Whether each row still thinks, behind the tokens that count."""
        if drafted is None:
            ids_NW, num_N = drawn_L[:, None], torch.ones_like(drawn_L)
        else:
            accepted = verify(drawn_L, drafted)
            ids_NW, num_N = accepted.token_ids_NW, accepted.num_accepted_N
            rows_L = rows_L[drafted.firsts()]
        counts_NW = torch.arange(ids_NW.shape[1], device=ids_NW.device) < num_N[:, None]
        thinks_N = self._thinks_behind(ids_NW, counts_NW, rows_L, asked)
        self._thinks_R.index_copy_(0, rows_L, thinks_N)

    def _thinks_behind(
        self, ids_NW: Tensor, counts_NW: Tensor, rows_N: Tensor, asked: ThinkingDrafts
    ) -> Tensor:
        """Whether a row thinks behind those of the tokens that count."""
        places_NW = torch.arange(1, ids_NW.shape[1] + 1, device=ids_NW.device) * counts_NW
        begun_N, ended_N = (
            (places_NW * (ids_NW == token)).amax(1) for token in (asked.begin, asked.end)
        )
        return torch.where(begun_N == ended_N, self._thinks_R[rows_N], begun_N > ended_N)


def _thinks(token_ids: np.ndarray, asked: ThinkingDrafts) -> bool:
    begun, ended = (np.flatnonzero(token_ids == token) for token in (asked.begin, asked.end))
    return len(begun) > 0 and (len(ended) == 0 or begun[-1] > ended[-1])
