"""Attention in C for decodes and short prompts: keys and values are read where they lie.

Each token is taken for itself, as a sequence that ends with it.

Legend: T tokens, H query heads, K kv heads, D head size, B blocks, S tokens per block.
"""

import torch
from torch import Tensor

from penstock.kernels.attention.backend import AttentionParams
from penstock.kernels.forward_batch import ForwardBatch
from penstock.kernels.native import library

MAX_PREFILL = 512  # tokens of a prompt; longer ones are faster as GEMMs
_LANES = 16  # heads and blocks are whole vectors of the widest machine


def can_attend(q_THD: Tensor, k_cache_BKSD: Tensor) -> bool:
    if q_THD.dtype is not torch.float32 or k_cache_BKSD.dtype is not torch.float32:
        return False
    _, _, block_size, head_size = k_cache_BKSD.shape
    return head_size % _LANES == block_size % _LANES == 0 and library() is not None


def attend(
    q_THD: Tensor,
    k_cache_BKSD: Tensor,
    v_cache_BKSD: Tensor,
    batch: ForwardBatch,
    num_tokens: int,
    params: AttentionParams,
    out_THD: Tensor,
    sinks_H: Tensor | None,
) -> None:
    """Fills `out_THD` for the first `num_tokens` tokens of the step."""
    rows_T, lens_T = _sequences(batch)
    _, num_heads, size = q_THD.shape
    _, num_kv_heads, block_size, _ = k_cache_BKSD.shape
    assert q_THD.stride()[1:] == (size, 1) and out_THD.is_contiguous(), q_THD.stride()
    assert k_cache_BKSD.stride() == v_cache_BKSD.stride() and k_cache_BKSD.stride(2) == size
    window = params.window or batch.max_kv_len
    library().decode_attention(  # type: ignore[union-attr]
        q_THD.data_ptr(), q_THD.stride(0), k_cache_BKSD.data_ptr(), v_cache_BKSD.data_ptr(),
        rows_T.data_ptr(), lens_T.data_ptr(), batch.block_table_RM.data_ptr(),
        0 if sinks_H is None else sinks_H.data_ptr(), out_THD.data_ptr(),
        num_tokens, num_heads, num_kv_heads, size, block_size, k_cache_BKSD.stride(0),
        batch.block_table_RM.shape[1], window, params.has_chunks, params.scale,
        params.soft_cap or 0.0,
    )  # fmt: skip


def _sequences(batch: ForwardBatch) -> tuple[Tensor, Tensor]:
    """Of each token: its row, and how many tokens it sees."""
    if batch.num_decodes == batch.num_entries:
        return batch.rows_N, batch.kv_lens_N
    if _sequences not in batch.plans:
        counts_N = batch.query_starts_N1.diff()
        rows_T = batch.rows_N.repeat_interleave(counts_N)
        batch.plans[_sequences] = rows_T, (batch.positions_T + 1).int()
    rows_T, lens_T = batch.plans[_sequences]
    return rows_T, lens_T
