"""Rotary embedding of queries and keys in one launch, with or without the cache write.

Legend: T tokens, H query heads, K kv heads, D head size, P positions, B blocks, S tokens per block.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.op import arch
from penstock.kernels.rope.reference import rope, rope_kv_write

_HEADS = 8  # heads of one program


@triton.jit
def _rotated(
    x_ptr, heads, num_heads, table_ptr, position,
    D: tl.constexpr, ROT: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """x * cos + x[partner] * (-sin or sin) for a tile of heads of one token, in fp32."""
    HALF: tl.constexpr = ROT // 2
    cols = tl.arange(0, BLOCK_D)[None, :]
    is_first, is_rotated = cols < HALF, cols < ROT
    angle = tl.where(is_first, cols, cols - HALF)
    cos = tl.load(table_ptr + position * ROT + angle, mask=is_rotated, other=1.0)
    sin = tl.load(table_ptr + position * ROT + HALF + angle, mask=is_rotated, other=0.0)
    sin = tl.where(is_first, -sin, sin)
    partner = tl.where(is_first, cols + HALF, cols - HALF)
    base = x_ptr + heads * D
    x = tl.load(base + cols, mask=(heads < num_heads) & (cols < D), other=0.0)
    x_partner = tl.load(base + partner, mask=(heads < num_heads) & is_rotated, other=0.0)
    return x.to(tl.float32) * cos + x_partner.to(tl.float32) * sin


@triton.jit
def _rope(
    q_ptr, k_ptr, v_ptr, table_ptr, positions_ptr, slots_ptr,
    q_out_ptr, k_out_ptr, v_cache_ptr,
    stride_qt, stride_kt, stride_vt, stride_b,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, ROT: tl.constexpr, S: tl.constexpr,
    BLOCK_D: tl.constexpr, HEADS: tl.constexpr, TO_CACHE: tl.constexpr,
):  # fmt: skip
    """One program per (token, group of heads): the query's groups first, then the key's.

    TO_CACHE: k_out is the key cache and the values are copied along; else k_out is [T, K, D].
    """
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    position = tl.load(positions_ptr + token)
    cols = tl.arange(0, BLOCK_D)[None, :]
    Q_GROUPS: tl.constexpr = (H + HEADS - 1) // HEADS
    if group < Q_GROUPS:
        heads = (group * HEADS + tl.arange(0, HEADS))[:, None]
        q = _rotated(q_ptr + token * stride_qt, heads, H, table_ptr, position, D, ROT, BLOCK_D)
        to = token * (H * D) + heads * D + cols
        tl.store(q_out_ptr + to, q.to(q_out_ptr.dtype.element_ty), mask=(heads < H) & (cols < D))
    else:
        heads = ((group - Q_GROUPS) * HEADS + tl.arange(0, HEADS))[:, None]
        inside = (heads < K) & (cols < D)
        k = _rotated(k_ptr + token * stride_kt, heads, K, table_ptr, position, D, ROT, BLOCK_D)
        if TO_CACHE:
            slot = tl.load(slots_ptr + token)
            to = (slot // S) * stride_b + heads * (S * D) + (slot % S) * D + cols
            v = tl.load(v_ptr + token * stride_vt + heads * D + cols, mask=inside, other=0.0)
            tl.store(v_cache_ptr + to, v.to(v_cache_ptr.dtype.element_ty), mask=inside)
        else:
            to = token * (K * D) + heads * D + cols
        tl.store(k_out_ptr + to, k.to(k_out_ptr.dtype.element_ty), mask=inside)


def _launch(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    cos_sin_PD: Tensor,
    positions_T: Tensor,
    slots_T: Tensor,
    q_out_THD: Tensor,
    k_out: Tensor,
    v_cache_BKSD: Tensor,
    to_cache: bool,
) -> None:
    num_tokens, num_heads, head_size = q_THD.shape
    num_kv_heads = k_TKD.shape[1]
    for x in (q_THD, k_TKD, v_TKD):
        assert x.stride()[1:] == (head_size, 1), x.stride()
    if num_tokens == 0:
        return
    block_d = triton.next_power_of_2(head_size)
    grid = (num_tokens, triton.cdiv(num_heads, _HEADS) + triton.cdiv(num_kv_heads, _HEADS))
    _rope[grid](
        q_THD, k_TKD, v_TKD, cos_sin_PD, positions_T, slots_T, q_out_THD, k_out, v_cache_BKSD,
        q_THD.stride(0), k_TKD.stride(0), v_TKD.stride(0), k_out.stride(0),
        H=num_heads, K=num_kv_heads, D=head_size, ROT=cos_sin_PD.shape[1],
        S=k_out.shape[2] if to_cache else 1, BLOCK_D=block_d, HEADS=_HEADS, TO_CACHE=to_cache,
        num_warps=max(1, min(8, block_d * _HEADS // 256)),
    )  # fmt: skip


@rope.impl("triton", needs=arch(80))
def rope_triton(
    q_THD: Tensor, k_TKD: Tensor, cos_sin_PD: Tensor, positions_T: Tensor
) -> tuple[Tensor, Tensor]:
    q_out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    k_out_TKD = torch.empty(k_TKD.shape, dtype=k_TKD.dtype, device=k_TKD.device)
    _launch(
        q_THD, k_TKD, k_TKD, cos_sin_PD, positions_T, positions_T,
        q_out_THD, k_out_TKD, k_out_TKD, to_cache=False,
    )  # fmt: skip
    return q_out_THD, k_out_TKD


@rope_kv_write.impl("triton", needs=arch(80))
def rope_kv_write_triton(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    cos_sin_PD: Tensor,
    positions_T: Tensor,
    k_cache_BKSD: Tensor,
    v_cache_BKSD: Tensor,
    slots_T: Tensor,
) -> Tensor:
    assert k_cache_BKSD[0].is_contiguous() and k_cache_BKSD.stride() == v_cache_BKSD.stride()
    q_out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    _launch(
        q_THD, k_TKD, v_TKD, cos_sin_PD, positions_T, slots_T,
        q_out_THD, k_cache_BKSD, v_cache_BKSD, to_cache=True,
    )  # fmt: skip
    return q_out_THD
