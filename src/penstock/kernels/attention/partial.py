"""Decode attention over a part of each sequence's keys, and the merge of what the parts gave.

Legend: N sequences, H query heads, K kv heads, G = H / K, D head size, V value size, B blocks, S
tokens per block, L keys, P parts.
"""

import torch
from torch import Tensor

from penstock.kernels.attention.backend import AttentionParams, cached_values
from penstock.kernels.op import op


@op(gpu_module="penstock.kernels.attention.triton_decode")
def partial_decode(
    q_NHD: Tensor,
    k_cache_BKSD: Tensor,
    v_cache_BKSD: Tensor,
    rows_N: Tensor,
    kv_lens_N: Tensor,
    block_table_RM: Tensor,
    params: AttentionParams,
    max_kv_len: int,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Of query n over the kv_lens[n] > 0 cached tokens of row rows[n]: the attention out_NHD, and
    the logarithm of the sum of exponentials of its scores, lse_NH (fp32).

    The scales are those of `CacheScales`.
    """
    num_kv_heads, block_size = k_cache_BKSD.shape[1:3]
    num_blocks = min(-(-max_kv_len // block_size), block_table_RM.shape[1])
    blocks_NM = block_table_RM[rows_N.long(), :num_blocks].long()
    seen_NL = torch.arange(num_blocks * block_size, device=q_NHD.device) < kv_lens_N[:, None]

    def gathered(cache_BKSD: Tensor, scales: Tensor | None) -> Tensor:
        found = None if scales is None else scales[blocks_NM]
        kv_NMKSD = cached_values(cache_BKSD[blocks_NM], found)
        kv_NKLD = kv_NMKSD.transpose(1, 2).flatten(2, 3)
        return kv_NKLD.masked_fill(~seen_NL[:, None, :, None], 0.0)

    k_NKLD, v_NKLD = gathered(k_cache_BKSD, k_scales), gathered(v_cache_BKSD, v_scales)
    q_NKGD = q_NHD.float().unflatten(1, (num_kv_heads, -1))
    scores_NKGL = q_NKGD @ k_NKLD.transpose(2, 3) * params.scale
    if params.soft_cap is not None:
        scores_NKGL = params.soft_cap * torch.tanh(scores_NKGL / params.soft_cap)
    scores_NKGL = scores_NKGL.masked_fill(~seen_NL[:, None, None], -torch.inf)
    lse_NKG = scores_NKGL.logsumexp(-1)
    out_NKGD = (scores_NKGL - lse_NKG.unsqueeze(-1)).exp() @ v_NKLD * params.v_scale
    return out_NKGD.flatten(1, 2).to(q_NHD.dtype), lse_NKG.flatten(1)


def merged(out_PNHV: Tensor, lse_PNH: Tensor, sinks_H: Tensor | None) -> Tensor:
    """The attention over the keys of all parts. A part without keys has -inf for its `lse`; one at
    least has some. `sinks_H`: a score of each head that has no value."""
    lse_NH = lse_PNH.logsumexp(0)
    weights_PNH = (lse_PNH - lse_NH).exp()
    if sinks_H is not None:
        weights_PNH = weights_PNH * torch.sigmoid(lse_NH - sinks_H)
    return (out_PNHV.float() * weights_PNH.unsqueeze(-1)).sum(0).to(out_PNHV.dtype)
