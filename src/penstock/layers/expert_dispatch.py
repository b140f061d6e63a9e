"""`ExpertDispatch`: tokens go to the ranks of their experts, and the sums come back.

A token goes once to each rank that has any of its experts, with the slots and weights of those. The
host has to know how many, and waits for it. Where it must not, in a step that a graph captures, the
tokens of all ranks come together instead.
"""

# T tokens of this rank, K experts of a token, D hidden size, R ranks, M tokens that go to ranks,
# N tokens that come, P most ranks of a token

from collections.abc import Callable

import torch
from torch import Tensor

from penstock.kernels.forward_batch import ForwardBatch
from penstock.parallel.all_to_all import exchanged, exchanged_counts
from penstock.parallel.collectives import gather_tokens, scatter_sums
from penstock.parallel.mesh import RankMesh

Compute = Callable[[Tensor, Tensor, Tensor], Tensor]
"""This rank's part of the sums, from tokens, slots of all ranks and weights."""


class ExpertDispatch:
    def __init__(self, mesh: RankMesh, rank_of_S: Tensor) -> None:
        """`rank_of_S`: who has a slot."""
        self._role, self._rank_of_S = mesh.role("tokens"), rank_of_S

    @property
    def rank(self) -> int:
        return self._role.rank

    def __call__(
        self,
        compute: Compute,
        x_TD: Tensor,
        slots_TK: Tensor,
        weights_TK: Tensor,
        batch: ForwardBatch,
    ) -> Tensor:
        """The sums of this rank's tokens."""
        choices_TC = torch.cat((slots_TK.int(), weights_TK.float().view(torch.int32)), dim=1)
        if batch.rank_tokens is None:
            return self._gathered(compute, x_TD, choices_TC)
        return self._sent(compute, x_TD, slots_TK, choices_TC)

    def _gathered(self, compute: Compute, x_TD: Tensor, choices_TC: Tensor) -> Tensor:
        everywhere = (gather_tokens(one, self._role, None) for one in (x_TD, choices_TC))
        return scatter_sums(_computed(compute, *everywhere), self._role, None)

    def _sent(self, compute: Compute, x_TD: Tensor, slots_TK: Tensor, choices_TC: Tensor) -> Tensor:
        ranks_TK = self._rank_of_S[slots_TK.long()]
        goes_TR = ranks_TK.new_zeros((len(x_TD), self._role.size), dtype=torch.bool)
        goes_TR.scatter_(1, ranks_TK, True)
        sent, received = exchanged_counts(goes_TR.sum(0), self._role)
        ranks_M, tokens_M = goes_TR.t().nonzero(as_tuple=True)
        come_ND, choices_NC = (
            exchanged(one[tokens_M], sent, received, self._role) for one in (x_TD, choices_TC)
        )
        y_ND = _computed(compute, come_ND, choices_NC) if len(come_ND) else come_ND
        y_MD = exchanged(y_ND, received, sent, self._role)
        most = min(goes_TR.shape[1], ranks_TK.shape[1])
        return _summed(y_MD, goes_TR, ranks_M, tokens_M, most)


def _computed(compute: Compute, x_ND: Tensor, choices_NC: Tensor) -> Tensor:
    slots_NK, weights_NK = choices_NC.chunk(2, dim=1)
    return compute(x_ND, slots_NK, weights_NK.contiguous().view(torch.float32))


def _summed(y_MD: Tensor, goes_TR: Tensor, ranks_M: Tensor, tokens_M: Tensor, most: int) -> Tensor:
    """Of each token what its ranks gave, `most` of them, always in their order, in fp32."""
    num_sent = len(y_MD)
    y_MD = torch.cat((y_MD, y_MD.new_zeros(1, y_MD.shape[1])))  # the last one stands for none
    places_TR = (goes_TR.cumsum(1) - 1)[tokens_M, ranks_M]
    rows_TP = tokens_M.new_full((len(goes_TR), most), num_sent)
    rows_TP[tokens_M, places_TR] = torch.arange(num_sent, device=y_MD.device)
    return y_MD[rows_TP].float().sum(1).to(y_MD.dtype)
