"""The last stage of sampling where tokens were drafted: how many of them are kept.

No rejection sampling: every position draws its token as plain decoding would, from the same seed
and index. While that is the drafted one, the logits behind it are those of the same sequence, so
the next draw counts, too.
Output is therefore token for token that of decoding without drafts, whatever the sampling, unless
`relaxed` has put a draft in the place of what was drawn.

Legend: N entries that sample, L rows of logits, W most rows of an entry, K = W - 1 drafts.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.transfer import to_device
from penstock.types.step import Int32s


@dataclass(frozen=True, slots=True)
class DraftedRows:
    """Rows of logits by entry: row j of an entry has been fed the drafts before j, and says which
    token takes the place of draft j."""

    counts: Int32s  # host: rows of each entry
    drafts_NK: Tensor  # int64; a negative one is none

    @property
    def width(self) -> int:
        return int(self.counts.max())

    def firsts(self) -> Tensor:
        """The first row of each entry."""
        return to_device(np.cumsum(self.counts) - self.counts, self.drafts_NK.device)

    def compared(self) -> Tensor:
        """int64 [L]: the draft whose place each row's token takes; negative behind the last."""
        device, last = self.drafts_NK.device, self.counts - 1
        entries = np.repeat(np.arange(len(self.counts)), self.counts)
        offsets = np.arange(len(entries)) - (np.cumsum(self.counts) - self.counts)[entries]
        index_2L = np.stack((entries, np.minimum(offsets, self.drafts_NK.shape[1] - 1)))
        entries_L, offsets_L = to_device(index_2L, device)
        is_last_L = to_device(offsets == last[entries], device)
        return torch.where(is_last_L, -1, self.drafts_NK[entries_L, offsets_L])

    def earlier_drafts(self) -> tuple[Tensor, Tensor]:
        """(int64 [L, K], bool [L, K]): the drafts of each row's entry; which it has been fed."""
        device = self.drafts_NK.device
        entries = np.repeat(np.arange(len(self.counts)), self.counts)
        offsets = np.arange(len(entries)) - (np.cumsum(self.counts) - self.counts)[entries]
        drafts_LK = self.drafts_NK[to_device(entries, device)]
        offsets_K = torch.arange(drafts_LK.shape[1], device=device)
        is_fed_LK = offsets_K < to_device(offsets, device)[:, None]
        return drafts_LK.clamp(min=0), is_fed_LK & (drafts_LK >= 0)


@dataclass(frozen=True, slots=True)
class Accepted:
    """New tokens of each entry: the drafts that were right, and one more."""

    token_ids_NW: Tensor
    num_accepted_N: Tensor  # int64, 1..W


def verify(token_ids_L: Tensor, drafted: DraftedRows) -> Accepted:
    """Which of the drawn tokens count."""
    device, counts = token_ids_L.device, drafted.counts.astype(np.int64)
    firsts_N, counts_N = to_device(np.stack((np.cumsum(counts) - counts, counts)), device)
    offsets_W = torch.arange(drafted.width, device=device)
    rows_NW = (firsts_N[:, None] + offsets_W).clamp(max=len(token_ids_L) - 1)
    token_ids_NW = token_ids_L[rows_NW]
    is_right_NK = token_ids_NW[:, :-1] == drafted.drafts_NK
    is_right_NK &= offsets_W[:-1] < counts_N[:, None] - 1
    return Accepted(token_ids_NW, 1 + is_right_NK.cumprod(1).sum(1))
