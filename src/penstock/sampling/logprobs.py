"""Log-probabilities of chosen and best tokens, on the device until their owner copies them.

They are the model's own: in fp32, before penalties, temperature and filters.

Legend: J positions asked about, V vocabulary, K best tokens, T tokens, D hidden size.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.transfer import start_copy_to_host
from penstock.types.step import LogprobRows


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """`LogprobRows` as tensors."""

    token_ids_J: Tensor
    logprobs_J: Tensor
    ranks_J: Tensor  # 1 = most likely
    top_ids_JK: Tensor  # best first
    top_logprobs_JK: Tensor

    def start_copy(self) -> "TokenLogprobs":
        """The same on the host. A GPU only starts the copy: wait for its stream before reading."""
        return TokenLogprobs(
            **{field.name: start_copy_to_host(getattr(self, field.name)) for field in fields(self)}
        )

    def rows(
        self, start: int = 0, stop: int | None = None, top_k: int | None = None
    ) -> LogprobRows:
        """Positions [start, stop) with their best `top_k`; the tensors must be on the host."""
        at = slice(start, stop)
        return LogprobRows(
            token_ids=self.token_ids_J[at].numpy().astype(np.int32),
            logprobs=self.logprobs_J[at].numpy(),
            ranks=self.ranks_J[at].numpy().astype(np.int32),
            top_ids=self.top_ids_JK[at, :top_k].numpy().astype(np.int32),
            top_logprobs=self.top_logprobs_JK[at, :top_k].numpy(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledLogprobs:
    """Of the new tokens of one step: entry j belongs to logits row positions[j], which asked."""

    positions: NDArray[np.int64]
    top_k: NDArray[np.int32]  # asked by each; the tensors hold the largest
    tokens: TokenLogprobs

    def start_copy(self) -> "SampledLogprobs":
        return SampledLogprobs(
            positions=self.positions, top_k=self.top_k, tokens=self.tokens.start_copy()
        )

    def rows(
        self, firsts: NDArray[np.integer[Any]], counts: NDArray[np.integer[Any]]
    ) -> dict[int, LogprobRows]:
        """Of those that asked: `counts[i]` logits rows from `firsts[i]` on, by i; the tensors must
        be on the host."""
        found = np.searchsorted(self.positions, firsts)
        return {
            i: self.tokens.rows(at, at + count, int(self.top_k[at]))
            for i, (first, at, count) in enumerate(
                zip(firsts.tolist(), found.tolist(), counts.tolist(), strict=True)
            )
            if at < len(self.positions) and self.positions[at] == first
        }


def token_logprobs(
    logits_JV: Tensor, token_ids_J: Tensor, top_k: int, named_JK: Tensor | None = None
) -> TokenLogprobs:
    """What the logits say about one token per row, and their best `top_k`.

    `named_JK`: tokens to report in place of the best ones, unless they are -1.
    """
    logits_JV = logits_JV.float()
    # Taken off first, so that a token that is all but certain keeps the digits of its small
    # logprob.
    logits_JV = logits_JV - logits_JV.amax(-1, keepdim=True)
    normalizer_J1 = logits_JV.logsumexp(-1, keepdim=True)
    chosen_J1 = logits_JV.gather(-1, token_ids_J[:, None])
    top_JK, top_ids_JK = logits_JV.topk(min(top_k, logits_JV.shape[-1]))
    if named_JK is not None:
        named_JK = named_JK[:, : top_ids_JK.shape[1]]
        top_ids_JK = torch.where(named_JK >= 0, named_JK, top_ids_JK)
        top_JK = logits_JV.gather(-1, top_ids_JK)
    return TokenLogprobs(
        token_ids_J=token_ids_J,
        logprobs_J=(chosen_J1 - normalizer_J1)[:, 0],
        ranks_J=(logits_JV > chosen_J1).sum(-1) + 1,
        top_ids_JK=top_ids_JK,
        top_logprobs_JK=top_JK - normalizer_J1,
    )


def prompt_logprobs(
    hidden_TD: Tensor,
    target_ids_T: Tensor,
    logits_fn: Callable[[Tensor], Tensor],
    top_k: int,
    chunk: int = 256,
) -> TokenLogprobs:
    """What position t says about target_ids[t], the token after it; `chunk` positions at once."""
    parts = [
        token_logprobs(logits_fn(hidden_CD), target_ids_C, top_k)
        for hidden_CD, target_ids_C in zip(
            hidden_TD.split(chunk), target_ids_T.split(chunk), strict=True
        )
    ]
    return TokenLogprobs(
        **{
            field.name: torch.cat([getattr(part, field.name) for part in parts])
            for field in fields(TokenLogprobs)
        }
    )
