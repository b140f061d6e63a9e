"""The GPU backend: decode entries through the split kernel, the others through the prefill kernel.

Legend: T tokens in the step, H query heads, K kv heads, D head size, B blocks, S tokens per block.
"""

import torch
from torch import Tensor

from penstock.kernels.attention.backend import AttentionParams, CacheScales, rounded
from penstock.kernels.attention.triton_decode import decode
from penstock.kernels.attention.triton_prefill import prefill
from penstock.kernels.batch import ForwardBatch


class TritonAttention:
    name = "triton"
    graph_safe = True

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
        num_decodes = batch.num_decodes
        is_rounded = out_scale_1 is not None and num_decodes == batch.num_entries
        dtype = torch.float8_e4m3fn if is_rounded else q_THD.dtype
        out_THD = torch.empty(q_THD.shape, dtype=dtype, device=q_THD.device)
        if num_decodes:
            decode(
                q_THD[:num_decodes],
                k_cache_BKSD,
                v_cache_BKSD,
                batch.rows_N[:num_decodes],
                batch.kv_lens_N,
                batch.block_table_RM,
                out_THD[:num_decodes],
                params,
                batch.max_kv_len,
                sinks_H=sinks_H,
                scales=scales,
                out_scale_1=out_scale_1,
            )
        if batch.num_entries > num_decodes:
            prefill(
                q_THD,
                k_cache_BKSD,
                v_cache_BKSD,
                batch.rows_N,
                batch.query_starts_N1,
                batch.kv_lens_N,
                batch.block_table_RM,
                out_THD,
                params,
                num_decodes,
                batch.max_query_len,
                sinks_H=sinks_H,
                scales=scales,
            )
        return out_THD if is_rounded else rounded(out_THD, out_scale_1)
