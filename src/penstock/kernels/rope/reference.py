"""References of rotary position embedding (RoPE) and of the paged KV cache write.

Legend: T tokens, H query heads, K kv heads, N heads, D head size, P positions, R rotated channels,
B blocks, S tokens per block. Of an NVFP4 cache a D has half of the channels: a byte has two codes.
"""

import torch
from torch import Tensor

from penstock.kernels.native import library
from penstock.kernels.norm import rms_norm
from penstock.kernels.op import cpu, native, op
from penstock.kernels.quantize.block_scaled import quantize_nvfp4
from penstock.kernels.quantize.reference import quantize_int8


def rotate(x_TND: Tensor, cos_sin_PR: Tensor, positions_T: Tensor) -> Tensor:
    """Rotate the first R channels of every head by its token's angles, in fp32; a new tensor.

    Row p of the float32 table holds the cosines of position p, then the sines. Channel i is
    rotated together with channel i + R / 2; channels from R on pass through.
    """
    cos, sin = cos_sin_PR[positions_T].unsqueeze(1).chunk(2, dim=-1)
    half = cos.shape[-1]
    first, second, rest = x_TND.split((half, half, x_TND.shape[-1] - 2 * half), dim=-1)
    first, second = first.float(), second.float()
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat([part.to(x_TND.dtype) for part in rotated] + [rest], dim=-1)


def stored(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """x / scale in the cache's dtype; FP8 saturates."""
    if dtype.itemsize > 1:
        return x.to(dtype)
    largest = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-largest, largest).to(dtype)


def write(
    x_TKD: Tensor,
    cache_BKSD: Tensor,
    slots_T: Tensor,
    scale: float,
    scales: Tensor | None = None,
) -> None:
    """cache[slot // S, :, slot % S] = what is stored of token t, for slot = slots_T[t].

    `scales` are those of an INT8 cache [B, K, S], or of an NVFP4 one [B, K, S, groups], in E4M3.
    They are written as well.
    """
    if scales is None:
        values_TKD = stored(x_TKD, scale, cache_BKSD.dtype)
    elif scales.dtype is torch.float8_e4m3fn:
        num_kv_heads, scale_1 = x_TKD.shape[1], torch.full((1,), scale, device=x_TKD.device)
        codes, found = quantize_nvfp4.reference(x_TKD.flatten(0, 1), scale_1)
        values_TKD, found_TKG = (x.unflatten(0, (-1, num_kv_heads)) for x in (codes, found))
        _put(found_TKG, scales, slots_T)
    else:
        values_TKD, scales_TK1 = quantize_int8.reference(x_TKD, None)
        _put(scales_TK1.squeeze(-1), scales, slots_T)
    _put(values_TKD, cache_BKSD, slots_T)


def _put(values: Tensor, plane: Tensor, slots_T: Tensor) -> None:
    if plane.dtype.itemsize == 1:  # indexed writes know no FP8
        values, plane = values.view(torch.uint8), plane.view(torch.uint8)
    block_size = plane.shape[2]
    plane[slots_T // block_size, :, slots_T % block_size] = values


@op(gpu_module="penstock.kernels.rope.triton")
def rope_kv_write(
    qkv_TND: Tensor,
    q_weight_D: Tensor | None,
    k_weight_D: Tensor | None,
    eps: float,
    cos_sin_PR: Tensor,
    positions_T: Tensor,
    k_cache_BKSD: Tensor,
    v_cache_BKSD: Tensor,
    slots_T: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    has_gates: bool = False,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> Tensor:
    """From a fused projection to queries ready for attention and a cache that knows the tokens.

    Of the N = H + 2 K heads the first H are the queries, the next K the keys, the last the values.
    With weights, query and key heads are normed first. Queries and keys are rotated; keys and
    values are written to the cache, divided by their scale if it is FP8. If it is INT8, each
    head's largest becomes 127, and its scale is written, too; if it is NVFP4 (uint8), the largest
    of 16 channels becomes 6, and their scale is written, divided by the one given. Returns q_THD.

    `has_gates`: there are N = 2 H + 2 K heads. A query is followed by a gate, which is not read.
    """
    num_kv_heads = k_cache_BKSD.shape[1]
    num_before = qkv_TND.shape[1] - 2 * num_kv_heads
    q_THD, k_TKD, v_TKD = qkv_TND.split((num_before, num_kv_heads, num_kv_heads), dim=1)
    if has_gates:
        q_THD = q_THD[:, ::2]
    if q_weight_D is not None:
        q_THD = rms_norm.reference(q_THD, q_weight_D, eps)
    if k_weight_D is not None:
        k_TKD = rms_norm.reference(k_TKD, k_weight_D, eps)
    write(rotate(k_TKD, cos_sin_PR, positions_T), k_cache_BKSD, slots_T, k_scale, k_scales)
    write(v_TKD, v_cache_BKSD, slots_T, v_scale, v_scales)
    return rotate(q_THD, cos_sin_PR, positions_T)


@rope_kv_write.impl(
    "native",
    needs=native(),
    fits=lambda qkv, q_weight, k_weight, eps, table, positions, k_cache, v_cache, slots, *scales: (
        qkv.dtype is torch.float32 and k_cache.dtype is torch.float32
    ),
)
def rope_kv_write_native(
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
    num_tokens, num_all, size = qkv_TND.shape
    _, num_kv_heads, block_size, _ = k_cache_BKSD.shape
    q_step = 2 if has_gates else 1
    num_heads = (num_all - 2 * num_kv_heads) // q_step
    stride, stride_n, stride_d = qkv_TND.stride()
    assert (stride_n, stride_d) == (size, 1), qkv_TND.stride()
    assert k_cache_BKSD.stride() == v_cache_BKSD.stride() and k_cache_BKSD.stride(2) == size
    q_THD = qkv_TND.new_empty((num_tokens, num_heads, size))
    library().rope_kv_write(  # type: ignore[union-attr]
        qkv_TND.data_ptr(), stride,
        0 if q_weight_D is None else q_weight_D.data_ptr(),
        0 if k_weight_D is None else k_weight_D.data_ptr(),
        eps, cos_sin_PR.data_ptr(), positions_T.data_ptr(), slots_T.data_ptr(), q_THD.data_ptr(),
        k_cache_BKSD.data_ptr(), v_cache_BKSD.data_ptr(), num_tokens, num_heads, q_step,
        num_kv_heads, size, cos_sin_PR.shape[1], block_size, k_cache_BKSD.stride(0),
    )  # fmt: skip
    return q_THD


@rope_kv_write.impl(
    "torch",
    needs=cpu(),
    fits=lambda qkv, q_weight, k_weight, eps, table, positions, k_cache, v_cache, slots, *scales: (
        qkv.dtype == k_cache.dtype == torch.float32 and table.shape[1] == qkv.shape[2]
    ),
)
def rope_kv_write_torch(
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
    """Queries and keys side by side; at small batches the number of calls is the cost."""
    num_tokens, _, size = qkv_TND.shape
    num_kv_heads = k_cache_BKSD.shape[1]
    if has_gates:
        qkv_TND = torch.cat(
            (qkv_TND[:, : -2 * num_kv_heads : 2], qkv_TND[:, -2 * num_kv_heads :]), dim=1
        )
    num_heads = qkv_TND.shape[1] - 2 * num_kv_heads
    x_TND, v_TKD = qkv_TND.split((num_heads + num_kv_heads, num_kv_heads), dim=1)
    if q_weight_D is not None and k_weight_D is not None:
        q_THD, k_TKD = x_TND.split((num_heads, num_kv_heads), dim=1)
        x_TND = torch.cat(
            (rms_norm(q_THD, q_weight_D, eps), rms_norm(k_TKD, k_weight_D, eps)), dim=1
        )
    cos_T1C, sin_T1C = cos_sin_PR[positions_T].view(num_tokens, 2, 1, size // 2).unbind(1)
    x_TN2C = x_TND.unflatten(2, (2, size // 2))
    out_TN2C = x_TN2C * cos_T1C.unsqueeze(1)
    out_TN2C[:, :, 0].addcmul_(x_TN2C[:, :, 1], sin_T1C, value=-1)
    out_TN2C[:, :, 1].addcmul_(x_TN2C[:, :, 0], sin_T1C)
    q_THD, k_TKD = out_TN2C.flatten(2).split((num_heads, num_kv_heads), dim=1)
    blocks_T, offsets_T = slots_T // k_cache_BKSD.shape[2], slots_T % k_cache_BKSD.shape[2]
    k_cache_BKSD[blocks_T, :, offsets_T] = k_TKD
    v_cache_BKSD[blocks_T, :, offsets_T] = v_TKD
    return q_THD
