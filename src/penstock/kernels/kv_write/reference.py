"""The meaning of a paged cache write.

Legend: T tokens, K kv heads, D head size, B blocks, S tokens per block.
"""

from torch import Tensor

from penstock.kernels.op import op


@op(gpu_module="penstock.kernels.kv_write.triton")
def kv_write(
    k_TKD: Tensor, v_TKD: Tensor, k_cache_BKSD: Tensor, v_cache_BKSD: Tensor, slots_T: Tensor
) -> None:
    """cache[slot // S, :, slot % S] = token t's keys (values), for slot = slots_T[t]; in place."""
    block_size = k_cache_BKSD.shape[2]
    blocks_T, offsets_T = slots_T // block_size, slots_T % block_size
    k_cache_BKSD[blocks_T, :, offsets_T] = k_TKD.to(k_cache_BKSD.dtype)
    v_cache_BKSD[blocks_T, :, offsets_T] = v_TKD.to(v_cache_BKSD.dtype)
