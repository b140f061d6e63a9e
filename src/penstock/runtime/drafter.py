"""`Drafter`: proposes the tokens that a row's next step feeds beside its last one.

It runs on every rank, right behind sampling and on the device: with two steps in flight the host
has not seen the tokens that it goes on from. What it proposes is checked; a bad drafter costs time
and nothing else.
"""

# N rows of a step, W most new tokens of a row, K most drafts

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from penstock.config.run import RunConfig
from penstock.runtime.ngram_drafter import NGramDrafter
from penstock.types.step import RowJoin


class Drafter(Protocol):
    max_drafts: int  # K

    def join(self, joins: Sequence[RowJoin]) -> None:
        """Sequences take rows; whatever the rows held is gone."""

    def draft(
        self,
        rows_N: Tensor,
        indices_N: Tensor,
        token_ids_NW: Tensor,
        num_accepted_N: Tensor,
        max_kv_len: int,
    ) -> Tensor:
        """int64 [N, K]: tokens to follow the new ones, negative where there are none.

        Row i has gained the first `num_accepted_N[i]` of its tokens, from `indices_N[i]` on;
        `max_kv_len` bounds where they end. Nothing waits for the device.
        """


def make_drafter(config: RunConfig, device: torch.device) -> Drafter | None:
    if config.drafting is None:
        return None
    return NGramDrafter(config.max_batch_size, config.max_seq_len, config.drafting, device)
