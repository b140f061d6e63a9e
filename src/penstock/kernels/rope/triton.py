"""Head norms, rotary embedding and the paged cache write in one launch.

Legend: T tokens, H query heads, K kv heads, N = H + 2 K heads, D head size, P positions, R rotated
channels, B blocks, S tokens per block.
"""

import torch
import triton
import triton.language as tl

from penstock.kernels.carveout import between_gemms, set_carveout
from penstock.kernels.launch import jit
from penstock.kernels.op import arch
from penstock.kernels.pdl import launch_options, let_next_start, wait_for_previous
from penstock.kernels.rope.reference import rope_kv_write
from penstock.kernels.sizes import cdiv, next_power_of_2
from penstock.kernels.triton_math import fp8_clamp, nvfp4_pairs, round_to_even

_HEADS = 8  # of a program, at small batches
_MANY_TOKENS = 128
_TILE = (
    2048  # channels of a program, where there are many; H200: gpt-oss, 8192 tokens 50 us, not 90
)


@triton.jit
def _rotated(
    x_ptr, inside, weight_ptr, eps, table_ptr, position, cols,
    D: tl.constexpr, R: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """x * cos + x[partner] * (-sin or sin) for a tile of heads of one token, in fp32."""
    HALF: tl.constexpr = R // 2
    is_first, is_rotated = cols < HALF, cols < R
    angle = tl.where(is_first, cols, cols - HALF)
    cos = tl.load(table_ptr + position * R + angle, mask=is_rotated, other=1.0)
    sin = tl.load(table_ptr + position * R + HALF + angle, mask=is_rotated, other=0.0)
    sin = tl.where(is_first, -sin, sin)
    partner = tl.where(is_first, cols + HALF, cols - HALF)
    x = tl.load(x_ptr + cols, mask=inside, other=0.0)
    other = tl.load(x_ptr + partner, mask=inside & is_rotated, other=0.0)
    dtype = x.dtype
    x, other = x.to(tl.float32), other.to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / D + eps)
        weight = tl.load(weight_ptr + cols, mask=cols < D, other=0.0).to(tl.float32)
        other_weight = tl.load(weight_ptr + partner, mask=is_rotated, other=0.0).to(tl.float32)
        x = (x * scale * weight).to(dtype).to(tl.float32)
        other = (other * scale * other_weight).to(dtype).to(tl.float32)
    return x * cos + other * sin


@triton.jit
def _to_int8(x):
    """(INT8 values, still fp32, their scale) of each head, as `quantize_int8`."""
    largest = tl.maximum(tl.max(tl.abs(x), axis=1, keep_dims=True), 1e-12)
    scale = tl.div_rn(largest, tl.zeros_like(largest) + 127.0)
    return round_to_even(tl.div_rn(x, tl.zeros_like(x) + scale)), scale


@triton.jit
def _store_nvfp4(x, outer, codes_to, scales_to, is_head, D: tl.constexpr):
    """The heads of a tile, as `quantize_nvfp4`; addresses and mask are by head, [HEADS, 1]."""
    HEADS: tl.constexpr = x.shape[0]
    BLOCK_D: tl.constexpr = x.shape[1]
    pairs, scales = nvfp4_pairs(tl.reshape(x, (HEADS * BLOCK_D // 16, 16)), outer)
    cols, groups = tl.arange(0, BLOCK_D // 2)[None, :], tl.arange(0, BLOCK_D // 16)[None, :]
    pairs = tl.reshape(pairs, (HEADS, BLOCK_D // 2))
    scales = tl.reshape(scales, (HEADS, BLOCK_D // 16))
    tl.store(codes_to + cols, pairs, mask=is_head & (cols < D // 2))
    tl.store(scales_to + groups, scales, mask=is_head & (groups < D // 16))


@jit
def _rope_kv_write(
    qkv_ptr, q_weight_ptr, k_weight_ptr, eps, table_ptr, positions_ptr, slots_ptr,
    q_out_ptr, k_cache_ptr, v_cache_ptr, k_scale, v_scale, k_scales_ptr, v_scales_ptr,
    stride_t, stride_b, stride_s,
    H: tl.constexpr, Q_STEP: tl.constexpr, K: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
    S: tl.constexpr, BLOCK_D: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_SCALES: tl.constexpr, IS_NVFP4: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per (token, group of heads): the query's groups first, then the key's.

    HAS_SCALES: the cache is INT8, or NVFP4.
    """
    wait_for_previous(PDL)
    let_next_start(PDL)  # not before: attention would crowd the SMs that the GEMM has left
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    position = tl.load(positions_ptr + token)
    cols = tl.arange(0, BLOCK_D)[None, :]
    x_ptr = qkv_ptr + token * stride_t
    Q_GROUPS: tl.constexpr = (H + HEADS - 1) // HEADS
    if group < Q_GROUPS:
        heads = (group * HEADS + tl.arange(0, HEADS))[:, None]
        inside = (heads < H) & (cols < D)
        q_ptr = x_ptr + heads * (Q_STEP * D)
        q = _rotated(q_ptr, inside, q_weight_ptr, eps, table_ptr, position, cols, D, R, HAS_NORM)
        to = (token * H + heads) * D + cols
        tl.store(q_out_ptr + to, q.to(q_out_ptr.dtype.element_ty), mask=inside)
    else:
        kv_heads = ((group - Q_GROUPS) * KV_HEADS + tl.arange(0, KV_HEADS))[:, None]
        is_kv = (kv_heads < K) & (cols < D)
        k_ptr = x_ptr + (H * Q_STEP + kv_heads) * D
        k = _rotated(k_ptr, is_kv, k_weight_ptr, eps, table_ptr, position, cols, D, R, HAS_NORM)
        k = k.to(qkv_ptr.dtype.element_ty).to(tl.float32)
        v = tl.load(k_ptr + K * D + cols, mask=is_kv, other=0.0).to(tl.float32)
        slot = tl.load(slots_ptr + token)
        if IS_NVFP4:
            is_head, place = kv_heads < K, slot % S
            codes_to = (slot // S) * stride_b + (kv_heads * S + place) * (D // 2)
            groups_to = (slot // S) * stride_s + (kv_heads * S + place) * (D // 16)
            _store_nvfp4(k, k_scale, k_cache_ptr + codes_to, k_scales_ptr + groups_to, is_head, D)
            _store_nvfp4(v, v_scale, v_cache_ptr + codes_to, v_scales_ptr + groups_to, is_head, D)
        else:
            if HAS_SCALES:
                k, k_found = _to_int8(k)
                v, v_found = _to_int8(v)
                scale_to = (slot // S) * stride_s + kv_heads * S + slot % S
                tl.store(k_scales_ptr + scale_to, k_found, mask=kv_heads < K)
                tl.store(v_scales_ptr + scale_to, v_found, mask=kv_heads < K)
            elif (
                k_cache_ptr.dtype.element_ty.primitive_bitwidth == 8
            ):  # as stored() in the reference
                k = fp8_clamp(k / k_scale)
                v = fp8_clamp(v / v_scale)
            kv_to = (slot // S) * stride_b + kv_heads * (S * D) + (slot % S) * D + cols
            tl.store(k_cache_ptr + kv_to, k.to(k_cache_ptr.dtype.element_ty), mask=is_kv)
            tl.store(v_cache_ptr + kv_to, v.to(v_cache_ptr.dtype.element_ty), mask=is_kv)


@rope_kv_write.impl("triton", needs=arch(80))
def rope_kv_write_triton(
    qkv_TND,
    q_weight_D,
    k_weight_D,
    eps,
    cos_sin_PR,
    positions_T,
    k_cache_BKSD,
    v_cache_BKSD,
    slots_T,
    k_scale=1.0,
    v_scale=1.0,
    has_gates=False,
    k_scales=None,
    v_scales=None,
):
    assert k_cache_BKSD[0].is_contiguous() and k_cache_BKSD.stride() == v_cache_BKSD.stride()
    num_tokens, num_all, size = qkv_TND.shape
    assert qkv_TND.stride()[1:] == (size, 1), qkv_TND.stride()
    _, num_kv_heads, block_size, _ = k_cache_BKSD.shape
    q_step = 2 if has_gates else 1
    num_heads = (num_all - 2 * num_kv_heads) // q_step
    q_THD = torch.empty((num_tokens, num_heads, size), dtype=qkv_TND.dtype, device=qkv_TND.device)
    if num_tokens == 0:
        return q_THD
    block_d = next_power_of_2(size)
    heads = _HEADS
    if num_tokens >= _MANY_TOKENS and q_weight_D is None:  # with a norm it is slower
        heads = max(_HEADS, min(_TILE // block_d, next_power_of_2(num_heads)))
    kv_heads = min(heads, next_power_of_2(num_kv_heads))
    grid = (num_tokens, cdiv(num_heads, heads) + cdiv(num_kv_heads, kv_heads))
    is_nvfp4 = k_scales is not None and k_scales.dtype is torch.float8_e4m3fn
    if is_nvfp4:  # written as bits: not every GPU that unpacks them has FP8
        k_scales, v_scales = k_scales.view(torch.uint8), v_scales.view(torch.uint8)
    kernel = _rope_kv_write[grid](
        qkv_TND, q_weight_D, k_weight_D, eps, cos_sin_PR, positions_T, slots_T,
        q_THD, k_cache_BKSD, v_cache_BKSD, k_scale, v_scale, k_scales, v_scales,
        qkv_TND.stride(0), k_cache_BKSD.stride(0),
        0 if k_scales is None else k_scales.stride(0),
        H=num_heads, Q_STEP=q_step, K=num_kv_heads, D=size, R=cos_sin_PR.shape[1], S=block_size,
        BLOCK_D=block_d, HEADS=heads, KV_HEADS=kv_heads, HAS_NORM=q_weight_D is not None,
        HAS_SCALES=k_scales is not None, IS_NVFP4=is_nvfp4,
        num_warps=max(1, min(8, block_d * heads // 256)), **launch_options(qkv_TND),
    )  # fmt: skip
    set_carveout(kernel, between_gemms(num_tokens))
    return q_THD
