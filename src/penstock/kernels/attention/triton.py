"""The GPU backend: decodes through the split-KV kernel, the others through the prefill kernel.

Legend: T tokens in the step, H query heads, K kv heads, D head size, B blocks, S tokens per block.
"""

import torch
from torch import Tensor

from penstock.kernels.attention.backend import AttentionParams, CacheScales, quantized_output
from penstock.kernels.attention.triton_decode import decode
from penstock.kernels.attention.triton_prefill import prefill
from penstock.kernels.forward_batch import ForwardBatch


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
        dtype = q_THD.dtype if out_scale_1 is None else torch.float8_e4m3fn
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
                runs=batch.runs,
            )
        if num_decodes == batch.num_entries:
            return out_THD
        plain_THD = out_THD if out_scale_1 is None else torch.empty_like(q_THD)
        prefill(
            q_THD,
            k_cache_BKSD,
            v_cache_BKSD,
            batch.rows_N,
            batch.query_starts_N1,
            batch.kv_lens_N,
            batch.block_table_RM,
            plain_THD,
            params,
            num_decodes,
            sinks_H=sinks_H,
            scales=scales,
        )
        if not num_decodes or out_scale_1 is None:
            return quantized_output(plain_THD, out_scale_1)
        prompts_THD = quantized_output(plain_THD[num_decodes:], out_scale_1)
        out_THD[num_decodes:].view(torch.uint8).copy_(prompts_THD.view(torch.uint8))
        return out_THD
