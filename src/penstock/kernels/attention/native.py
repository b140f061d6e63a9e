"""Decode attention in C: one query token per sequence, keys and values read where they lie.

Legend: T tokens, H query heads, K kv heads, D head size, B blocks, S tokens per block.
"""

import torch
from torch import Tensor

from penstock.kernels.attention.backend import AttentionParams
from penstock.kernels.batch import ForwardBatch
from penstock.kernels.native import library

_LANES = 16  # heads and blocks are whole vectors of the widest machine


def can_decode(q_THD: Tensor, k_cache_BKSD: Tensor) -> bool:
    if q_THD.dtype is not torch.float32 or k_cache_BKSD.dtype is not torch.float32:
        return False
    _, _, block_size, head_size = k_cache_BKSD.shape
    return head_size % _LANES == block_size % _LANES == 0 and library() is not None


def decode(
    q_THD: Tensor,
    k_cache_BKSD: Tensor,
    v_cache_BKSD: Tensor,
    batch: ForwardBatch,
    params: AttentionParams,
    out_THD: Tensor,
) -> None:
    """Fills `out_THD` for the step's decode entries, whose tokens are its first."""
    _, num_heads, size = q_THD.shape
    _, num_kv_heads, block_size, _ = k_cache_BKSD.shape
    assert q_THD.stride()[1:] == (size, 1) and out_THD.is_contiguous(), q_THD.stride()
    assert k_cache_BKSD.stride() == v_cache_BKSD.stride() and k_cache_BKSD.stride(2) == size
    window = params.window or batch.max_kv_len
    library().decode_attention(  # type: ignore[union-attr]
        q_THD.data_ptr(), q_THD.stride(0), k_cache_BKSD.data_ptr(), v_cache_BKSD.data_ptr(),
        batch.rows_N.data_ptr(), batch.kv_lens_N.data_ptr(), batch.block_table_RM.data_ptr(),
        out_THD.data_ptr(), batch.num_decodes, num_heads, num_kv_heads, size, block_size,
        k_cache_BKSD.stride(0), batch.block_table_RM.shape[1], window, params.scale,
    )  # fmt: skip
