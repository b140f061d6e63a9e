"""The GPU backend: decode entries through the split kernel, the others through the prefill kernel.

Legend: T tokens in the step, H query heads, K kv heads, D head size, B blocks, S tokens per block.
"""

import torch
from torch import Tensor

from penstock.kernels.attention.triton_decode import decode
from penstock.kernels.attention.triton_prefill import prefill
from penstock.kernels.batch import ForwardBatch
from penstock.kernels.kv_write.triton import kv_write_triton


class TritonAttention:
    name = "triton"
    graph_safe = True

    def run(
        self,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        k_cache_BKSD: Tensor,
        v_cache_BKSD: Tensor,
        batch: ForwardBatch,
        scale: float,
        window: int | None,
    ) -> Tensor:
        kv_write_triton(k_TKD, v_TKD, k_cache_BKSD, v_cache_BKSD, batch.slots_T)
        return self.attend(q_THD, k_cache_BKSD, v_cache_BKSD, batch, scale, window)

    def attend(
        self,
        q_THD: Tensor,
        k_cache_BKSD: Tensor,
        v_cache_BKSD: Tensor,
        batch: ForwardBatch,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """The second half of `run`, for a caller that has filled the cache itself."""
        out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
        num_decodes = batch.num_decodes
        if num_decodes:
            decode(
                q_THD[:num_decodes],
                k_cache_BKSD,
                v_cache_BKSD,
                batch.rows_N[:num_decodes],
                batch.kv_lens_N,
                batch.block_table_RM,
                out_THD[:num_decodes],
                scale,
                window,
                batch.max_kv_len,
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
                scale,
                window,
                num_decodes,
                batch.max_query_len,
            )
        return out_THD
