"""The paged cache write as one launch for keys and values.

Legend: T tokens, K kv heads, D head size, B blocks, S tokens per block.
"""

import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.kv_write.reference import kv_write
from penstock.kernels.op import arch


@triton.jit
def _kv_write(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slots_ptr, stride_kt, stride_vt, stride_b,
    K: tl.constexpr, S: tl.constexpr, D: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """cache[slot // S, :, slot % S, :] = new[t]; one program per token copies all its heads."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    heads = tl.arange(0, BLOCK_K)[:, None]
    cols = tl.arange(0, BLOCK_D)[None, :]
    inside = (heads < K) & (cols < D)
    k = tl.load(k_ptr + token * stride_kt + heads * D + cols, mask=inside)
    v = tl.load(v_ptr + token * stride_vt + heads * D + cols, mask=inside)
    to = (slot // S) * stride_b + heads * (S * D) + (slot % S) * D + cols
    tl.store(k_cache_ptr + to, k.to(k_cache_ptr.dtype.element_ty), mask=inside)
    tl.store(v_cache_ptr + to, v.to(v_cache_ptr.dtype.element_ty), mask=inside)


@kv_write.impl("triton", needs=arch(80))
def kv_write_triton(
    k_TKD: Tensor, v_TKD: Tensor, k_cache_BKSD: Tensor, v_cache_BKSD: Tensor, slots_T: Tensor
) -> None:
    num_tokens, num_kv_heads, head_size = k_TKD.shape
    assert k_TKD.stride()[1:] == v_TKD.stride()[1:] == (head_size, 1), k_TKD.stride()
    assert k_cache_BKSD[0].is_contiguous() and k_cache_BKSD.stride() == v_cache_BKSD.stride()
    if num_tokens == 0:
        return
    block_k, block_d = triton.next_power_of_2(num_kv_heads), triton.next_power_of_2(head_size)
    _kv_write[(num_tokens,)](
        k_TKD, v_TKD, k_cache_BKSD, v_cache_BKSD, slots_T,
        k_TKD.stride(0), v_TKD.stride(0), k_cache_BKSD.stride(0),
        K=num_kv_heads, S=k_cache_BKSD.shape[2], D=head_size, BLOCK_K=block_k, BLOCK_D=block_d,
        num_warps=max(1, min(8, block_k * block_d // 256)),
    )  # fmt: skip
