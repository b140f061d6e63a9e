"""Drafts from a sequence's own tokens: what followed the same n-gram before.

A scan, not an index: nothing to build when a long prompt joins, to keep in step with preemptions or
to bound. One int32 comparison per token of history takes tens of microseconds for 100k tokens on a
CPU core, far less than attention to them.

Legend: N rows of a step, R device rows, T tokens a row has room for, L = max_len, K drafts,
C candidates.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.op import cpu, op

NO_TOKEN = -1
_MAX_SCANNED = 1 << 22  # tokens at once, which bounds the memory a step takes


@op
def ngram_drafts(
    history_RT: Tensor,
    rows_N: Tensor,
    lengths_N: Tensor,
    max_len: int,
    max_size: int,
    num_drafts: int,
    use_oldest: bool,
) -> Tensor:
    """int64 [N, K]: what followed an earlier occurrence of the last tokens, NO_TOKEN behind it.

    The longest match of at most `max_size` tokens counts, the oldest or newest of equals. Sequences
    have `lengths_N` tokens, at most `max_len`, one at least.
    """
    per_scan = max(1, _MAX_SCANNED // max_len)
    scanned = (max_len, max_size, num_drafts, use_oldest)
    parts = [
        _scan(history_RT, rows, lengths, *scanned)
        for rows, lengths in zip(rows_N.split(per_scan), lengths_N.split(per_scan), strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _scan(
    history_RT: Tensor,
    rows_N: Tensor,
    lengths_N: Tensor,
    max_len: int,
    max_size: int,
    num_drafts: int,
    use_oldest: bool,
) -> Tensor:
    held_NL, lengths_N1 = history_RT[rows_N.long(), :max_len], lengths_N.long()[:, None]
    ends_L = torch.arange(max_len, device=held_NL.device)  # where a match would end
    is_match_NL = ends_L < lengths_N1 - 1
    sizes_NL = torch.zeros_like(held_NL)
    for back in range(min(max_size, max_len)):
        wanted_N1 = held_NL.gather(1, (lengths_N1 - 1 - back).clamp(min=0))
        before_NL = F.pad(held_NL[:, : max_len - back], (back, 0), value=NO_TOKEN)
        is_match_NL = is_match_NL & (before_NL == wanted_N1)
        sizes_NL += is_match_NL
    by_age_L = (ends_L.flip(0) if use_oldest else ends_L).int()
    end_N1 = (sizes_NL * max_len + by_age_L).argmax(1, keepdim=True)
    behind_NK = end_N1 + 1 + torch.arange(num_drafts, device=held_NL.device)
    is_there_NK = (sizes_NL.gather(1, end_N1) > 0) & (behind_NK < lengths_N1)
    drafts_NK = held_NL.gather(1, behind_NK.clamp(max=max_len - 1)).long()
    return torch.where(is_there_NK, drafts_NK, NO_TOKEN)


@ngram_drafts.impl("numpy", needs=cpu())
def ngram_drafts_numpy(history_RT, rows_N, lengths_N, max_len, max_size, num_drafts, use_oldest):
    """Row by row: one comparison with the last token finds the few places worth a closer look."""
    history = history_RT.numpy()
    drafts_NK = np.full((len(rows_N), num_drafts), NO_TOKEN, np.int64)
    for i, (row, length) in enumerate(zip(rows_N.tolist(), lengths_N.tolist(), strict=True)):
        held = history[row, :length]
        ends_C = np.flatnonzero(held[:-1] == held[-1])
        if not len(ends_C):
            continue
        sizes_C, is_match_C = np.ones_like(ends_C), np.ones(len(ends_C), np.bool_)
        for back in range(1, min(max_size, length)):
            is_match_C &= (ends_C >= back) & (held[ends_C - back] == held[-1 - back])
            sizes_C += is_match_C
        best = sizes_C.argmax() if use_oldest else len(sizes_C) - 1 - sizes_C[::-1].argmax()
        found = held[ends_C[best] + 1 : ends_C[best] + 1 + num_drafts]
        drafts_NK[i, : len(found)] = found
    return torch.from_numpy(drafts_NK)
