"""Reference of paged causal attention, in fp32, one sequence at a time. Runs anywhere, slowly.

Legend: T tokens in the step, H query heads, K kv heads, G = H / K, D head size, B blocks, S tokens
per block, N entries, Q queries and L keys of one entry.
"""

import torch
from torch import Tensor

from penstock.kernels.attention.backend import (
    AttentionParams,
    CacheScales,
    cached_values,
    quantized_output,
)
from penstock.kernels.forward_batch import ForwardBatch


def attend(
    q_QHD: Tensor,
    k_LKD: Tensor,
    v_LKD: Tensor,
    scale: float,
    window: int | None,
    sinks_H: Tensor | None = None,
    has_chunks: bool = False,
    soft_cap: float | None = None,
) -> Tensor:
    """softmax(q k^T * scale) v of one sequence; its Q queries are the last of its L positions.

    A head's sink is one more score of each of its queries, whose value is zero.
    """
    num_queries, num_heads, head_size = q_QHD.shape
    kv_len, num_kv_heads, _ = k_LKD.shape
    q_QKGD = q_QHD.float().view(num_queries, num_kv_heads, num_heads // num_kv_heads, head_size)
    scores_KGQL = torch.einsum("qkgd,lkd->kgql", q_QKGD, k_LKD.float()) * scale

    if soft_cap is not None:
        scores_KGQL = soft_cap * torch.tanh(scores_KGQL / soft_cap)
    key_L = torch.arange(kv_len, device=q_QHD.device)
    query_Q1 = key_L[kv_len - num_queries :, None]
    seen_QL = key_L <= query_Q1
    if window is not None:
        first_Q1 = query_Q1 // window * window if has_chunks else query_Q1 - window + 1
        seen_QL &= key_L >= first_Q1
    scores_KGQL = scores_KGQL.masked_fill(~seen_QL, -torch.inf)
    if sinks_H is None:
        weights_KGQL = scores_KGQL.softmax(-1)
    else:
        sinks_KGQ1 = sinks_H.float().view(num_kv_heads, -1, 1, 1).expand(-1, -1, num_queries, 1)
        weights_KGQL = torch.cat((scores_KGQL, sinks_KGQ1), dim=-1).softmax(-1)[..., :-1]

    # Of a key that none of the queries sees: it may be NaN, which a weight of zero does not undo.
    v_LKD = v_LKD.float().masked_fill(~seen_QL.any(0)[:, None, None], 0.0)
    out_QKGD = torch.einsum("kgql,lkd->qkgd", weights_KGQL, v_LKD)
    return out_QKGD.reshape(num_queries, num_heads, head_size).to(q_QHD.dtype)


def gather(plane: Tensor, blocks_M: Tensor, kv_len: int) -> Tensor:
    """The first `kv_len` keys (or values, or scales) of a sequence, in order: [L, K, ...]."""
    num_blocks = -(-kv_len // plane.shape[2])
    return plane[blocks_M[:num_blocks].long()].transpose(1, 2).flatten(0, 1)[:kv_len]


class ReferenceAttention:
    name = "reference"
    graph_safe = False

    def attend(
        self,
        q_THD: Tensor,
        k_cache_BKSD: Tensor,
        v_cache_BKSD: Tensor,
        batch: ForwardBatch,
        params: AttentionParams,
        sinks_H: Tensor | None = None,
        scales: CacheScales | None = None,
        out_scale_1: Tensor | None = None,
    ) -> Tensor:
        out_THD = torch.zeros_like(q_THD, memory_format=torch.contiguous_format)
        starts, kv_lens = batch.query_starts_N1.tolist(), batch.kv_lens_N.tolist()
        for entry, row in enumerate(batch.rows_N.tolist()):
            start, end, kv_len = starts[entry], starts[entry + 1], kv_lens[entry]
            blocks_M = batch.block_table_RM[row]
            k_LKD, v_LKD = (
                cached_values(
                    gather(cache, blocks_M, kv_len),
                    None if found is None else gather(found, blocks_M, kv_len),
                )
                for cache, found in zip(
                    (k_cache_BKSD, v_cache_BKSD), scales or (None, None), strict=True
                )
            )
            out_THD[start:end] = attend(
                q_THD[start:end],
                k_LKD,
                v_LKD * params.v_scale,
                params.scale,
                params.window,
                sinks_H,
                params.has_chunks,
                params.soft_cap,
            )
        return quantized_output(out_THD, out_scale_1)
