"""Paged attention on a CPU: decodes and short prompts in C, others through torch's fused attention.

Where the C functions are missing or do not fit, decodes go through torch as well, in batches.
What depends only on the step (index tensors, masks, groups) is worked out at its first layer and
kept for the others, so a layer costs two gathers and one attention call per group.

Legend: T tokens in the step, H query heads, K kv heads, G = H / K, D head size, B blocks, S tokens
per block, N entries of one group, M blocks and L padded keys of each, Q queries of one entry.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.attention import native
from penstock.kernels.attention.backend import (
    AttentionParams,
    CacheScales,
    cached_values,
    quantized_output,
)
from penstock.kernels.forward_batch import ForwardBatch

Int64s = NDArray[np.int64]

# A decode joins a group when padding it to the group's longest wastes at most a quarter of it.
_MIN_FILL = 0.75


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Decode entries attended together: their queries are `tokens`, their cache blocks `lines`."""

    tokens: slice | Tensor
    size: int
    lines: Tensor  # [N * K * M] rows of the cache seen as [B * K, S * D]
    keys: slice  # to keep of those gathered, L
    mask_N11L: Tensor | None  # None: all of them are seen
    seen: list[slice]  # where there is a mask: those of each entry


@dataclass(frozen=True, slots=True)
class _Prefill:
    start: int
    end: int
    lines: Tensor  # as above, of one entry
    keys: slice
    mask_QL: Tensor | None  # None: plain causal


@dataclass(frozen=True, slots=True)
class _Plan:
    groups: list[_DecodeGroup]
    prefills: list[_Prefill]


class SdpaAttention:
    name = "sdpa"
    graph_safe = False

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
        out_THD = self._attend(q_THD, k_cache_BKSD, v_cache_BKSD, batch, params, sinks_H, scales)
        if params.v_scale != 1.0:
            out_THD.mul_(params.v_scale)
        return quantized_output(out_THD, out_scale_1)

    def _attend(
        self,
        q_THD: Tensor,
        k_cache_BKSD: Tensor,
        v_cache_BKSD: Tensor,
        batch: ForwardBatch,
        params: AttentionParams,
        sinks_H: Tensor | None,
        scales: CacheScales | None,
    ) -> Tensor:
        _, num_kv_heads, block_size, _ = k_cache_BKSD.shape
        k_scales, v_scales = scales or (None, None)
        num_grouped = batch.num_decodes
        out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
        if native.can_attend(q_THD, k_cache_BKSD):
            all_short = batch.max_kv_len <= native.MAX_PREFILL
            num_here = batch.num_tokens if all_short else num_grouped
            if num_here:
                native.attend(
                    q_THD, k_cache_BKSD, v_cache_BKSD, batch, num_here, params, out_THD, sinks_H
                )
            if num_here == batch.num_tokens:
                return out_THD
            num_grouped = 0
        plan = self._plan(batch, num_grouped, num_kv_heads, block_size, params)
        for group in plan.groups:
            q_NHD = q_THD[group.tokens]
            out_THD[group.tokens] = _decode(
                q_NHD, k_cache_BKSD, v_cache_BKSD, group, params, sinks_H, scales
            )
        for entry in plan.prefills:
            here = slice(entry.start, entry.end)
            out_1HQD = _attention(
                q_THD[here].transpose(0, 1).unsqueeze(0),
                _gather(k_cache_BKSD, entry.lines, 1, entry.keys, q_THD.dtype, k_scales),
                _gather(v_cache_BKSD, entry.lines, 1, entry.keys, q_THD.dtype, v_scales),
                entry.mask_QL,
                entry.mask_QL is None,
                params,
                None if sinks_H is None else sinks_H[:, None],
            )
            out_THD[here] = out_1HQD[0].transpose(0, 1)
        return out_THD

    @staticmethod
    def _plan(
        batch: ForwardBatch,
        num_grouped: int,
        num_kv_heads: int,
        block_size: int,
        params: AttentionParams,
    ) -> _Plan:
        """The step's plan, built once per kind of layer."""
        key = (_Plan, num_kv_heads, block_size, params.window, params.has_chunks)
        if key not in batch.plans:
            batch.plans[key] = _make_plan(batch, num_grouped, num_kv_heads, block_size, params)
        plan: _Plan = batch.plans[key]
        return plan


def _attention(
    q_NHQD: Tensor,
    k_NKLD: Tensor,
    v_NKLD: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    params: AttentionParams,
    sinks_HQ: Tensor | None,
) -> Tensor:
    """What torch makes of it. Sinks (or [H, 1] of them) only make its result smaller, by a factor
    that follows from the sum of exponentials: this is why the kernel is called by its own name."""
    scale = params.scale
    if params.soft_cap is not None:
        return _capped_attention(q_NHQD, k_NKLD, v_NKLD, mask, is_causal, params, sinks_HQ)
    if sinks_HQ is None:
        return F.scaled_dot_product_attention(
            q_NHQD, k_NKLD, v_NKLD, mask, is_causal=is_causal, scale=scale, enable_gqa=True
        )
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=q_NHQD.dtype).masked_fill_(~mask, -torch.inf)
    out_NHQD, lse_NHQ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q_NHQD, k_NKLD, v_NKLD, 0.0, is_causal, attn_mask=mask, scale=scale
    )
    return out_NHQD * torch.sigmoid(lse_NHQ - sinks_HQ)[..., None].to(out_NHQD.dtype)


def _capped_attention(
    q_NHQD: Tensor,
    k_NKLD: Tensor,
    v_NKLD: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    params: AttentionParams,
    sinks_HQ: Tensor | None,
) -> Tensor:
    """The same with a soft cap, which torch's attention does not know: one kv head after the other,
    so that only the scores of its heads are held."""
    assert params.soft_cap is not None, params
    num_queries, num_keys = q_NHQD.shape[2], k_NKLD.shape[2]
    if is_causal:
        mask = torch.ones(num_queries, num_keys, dtype=torch.bool).tril_()
    out_NHQD, group = torch.empty_like(q_NHQD), q_NHQD.shape[1] // k_NKLD.shape[1]
    for kv_head in range(k_NKLD.shape[1]):
        here = slice(kv_head * group, (kv_head + 1) * group)
        k_N1LD, v_N1LD = k_NKLD[:, kv_head : kv_head + 1], v_NKLD[:, kv_head : kv_head + 1]
        scores_NGQL = (q_NHQD[:, here] @ k_N1LD.transpose(2, 3)).float()
        scores_NGQL.mul_(params.scale / params.soft_cap).tanh_().mul_(params.soft_cap)
        if mask is not None and mask.dtype == torch.bool:
            scores_NGQL.masked_fill_(~mask, -torch.inf)
        elif mask is not None:
            scores_NGQL.add_(mask)
        if sinks_HQ is None:
            weights_NGQL = scores_NGQL.softmax(-1)
        else:
            sinks_NGQ1 = sinks_HQ[here, :, None].expand(len(scores_NGQL), group, num_queries, 1)
            weights_NGQL = torch.cat((scores_NGQL, sinks_NGQ1), dim=-1).softmax(-1)[..., :-1]
        out_NHQD[:, here] = weights_NGQL.to(v_N1LD.dtype) @ v_N1LD
    return out_NHQD


def _decode(
    q_NHD: Tensor,
    k_cache_BKSD: Tensor,
    v_cache_BKSD: Tensor,
    group: _DecodeGroup,
    params: AttentionParams,
    sinks_H: Tensor | None,
    scales: CacheScales | None,
) -> Tensor:
    """Attention of one query per sequence. The G heads of a kv head stand in as its G queries."""
    num_kv_heads, head_size = k_cache_BKSD.shape[1], q_NHD.shape[-1]
    k_scales, v_scales = scales or (None, None)
    lines, size, keys, dtype = group.lines, group.size, group.keys, q_NHD.dtype
    q_NKGD = q_NHD.reshape(group.size, num_kv_heads, -1, head_size)
    k_NKLD = _gather(k_cache_BKSD, lines, size, keys, dtype, k_scales)
    v_NKLD = _gather(v_cache_BKSD, lines, size, keys, dtype, v_scales)
    # What the mask hides may be of another sequence, and NaN, which the weight 0 does not undo.
    for entry, seen in enumerate(group.seen):
        for x_KLD in (k_NKLD[entry], v_NKLD[entry]):
            x_KLD[:, : seen.start] = 0.0
            x_KLD[:, seen.stop :] = 0.0
    out_NKGD = _attention(
        q_NKGD,
        k_NKLD,
        v_NKLD,
        None if group.mask_N11L is None else group.mask_N11L.to(dtype),
        False,
        params,
        None if sinks_H is None else sinks_H.view(num_kv_heads, -1),
    )
    return out_NKGD.reshape(q_NHD.shape)


def _gather(
    cache_BKSD: Tensor,
    lines: Tensor,
    size: int,
    keys: slice,
    dtype: torch.dtype,
    scales: Tensor | None,
) -> Tensor:
    """Keys (or values) of `size` sequences, [N, K, L, D] cut to `keys`: one copy."""

    def gathered(plane: Tensor) -> Tensor:
        """[N, K, L, ...] of a plane [B, K, S, ...]."""
        chosen = plane.flatten(0, 1).index_select(0, lines)
        return chosen.view(size, plane.shape[1], -1, *plane.shape[3:])

    kv_NKLD = gathered(cache_BKSD)
    if scales is not None:
        kv_NKLD = cached_values(kv_NKLD, gathered(scales))
    return kv_NKLD.to(dtype)[:, :, keys]


def _make_plan(
    batch: ForwardBatch,
    num_grouped: int,
    num_kv_heads: int,
    block_size: int,
    params: AttentionParams,
) -> _Plan:
    """In numpy, whose small operations cost less than torch's."""
    rows_N, kv_lens_N = batch.rows_N.numpy(), batch.kv_lens_N.numpy()
    table_RM, starts_N1 = batch.block_table_RM.numpy(), batch.query_starts_N1.numpy()
    groups = []
    ends_N = kv_lens_N[:num_grouped].astype(np.int64)
    for entries in group_by_length((ends_N - _first_key(ends_N - 1, params)).tolist()):
        is_all = len(entries) == num_grouped
        tokens = slice(0, len(entries)) if is_all else torch.tensor(entries)
        groups.append(
            _plan_decode(
                tokens,
                table_RM[rows_N[entries]].astype(np.int64),
                kv_lens_N[entries].astype(np.int64),
                num_kv_heads,
                block_size,
                params,
            )
        )
    prefills = []
    for entry in range(batch.num_decodes, len(rows_N)):
        start, end, kv_len = int(starts_N1[entry]), int(starts_N1[entry + 1]), int(kv_lens_N[entry])
        blocks_M = table_RM[rows_N[entry]].astype(np.int64)
        prefills.append(
            _plan_prefill(start, end, blocks_M, kv_len, num_kv_heads, block_size, params)
        )
    return _Plan(groups, prefills)


def _lines(blocks_NM: Int64s, num_kv_heads: int) -> Tensor:
    """[N * K * M]: the rows, of a cache seen as [B * K, S * D], of every head of every block."""
    lines_NKM = blocks_NM[:, None, :] * num_kv_heads + np.arange(num_kv_heads)[:, None]
    return torch.from_numpy(lines_NKM.ravel())


def _first_key(position: Any, params: AttentionParams) -> Any:
    """The first key that a query sees; of a number, or of an array of them."""
    if params.window is None:
        return position * 0
    if params.has_chunks:
        return position // params.window * params.window
    return np.maximum(position - params.window + 1, 0)


def group_by_length(seen: list[int]) -> list[list[int]]:
    """Entries that see about as many keys together, each group in ascending order of entry."""
    groups: list[list[int]] = []
    longest = 0
    for entry in sorted(range(len(seen)), key=seen.__getitem__, reverse=True):
        if not groups or seen[entry] < _MIN_FILL * longest:
            groups.append([])
            longest = seen[entry]
        groups[-1].append(entry)
    return [sorted(group) for group in groups]


def _plan_decode(
    tokens: slice | Tensor,
    table_NM: Int64s,
    kv_lens_N: Int64s,
    num_kv_heads: int,
    block_size: int,
    params: AttentionParams,
) -> _DecodeGroup:
    kv_lens_N1 = kv_lens_N[:, None]
    first_key_N1 = _first_key(kv_lens_N1 - 1, params)
    first_block_N1 = first_key_N1 // block_size
    num_blocks = int((-(-kv_lens_N1 // block_size) - first_block_N1).max())
    # A shorter entry of the group reads on into blocks that the mask hides, inside the table.
    columns_NM = np.minimum(first_block_N1 + np.arange(num_blocks), table_NM.shape[1] - 1)
    blocks_NM = np.take_along_axis(table_NM, columns_NM, axis=1)

    num_keys = int((kv_lens_N1 - first_block_N1 * block_size).max())
    keys_NL = first_block_N1 * block_size + np.arange(num_keys)
    seen_NL = (keys_NL >= first_key_N1) & (keys_NL < kv_lens_N1)
    mask_N11L, seen = None, []
    if not seen_NL.all():
        mask_NL = np.where(seen_NL, np.float32(0.0), np.float32(-np.inf))
        mask_N11L = torch.from_numpy(mask_NL)[:, None, None, :]
        bounds_N2 = np.hstack((first_key_N1, kv_lens_N1)) - first_block_N1 * block_size
        seen = [slice(first, end) for first, end in bounds_N2.tolist()]
    return _DecodeGroup(
        tokens,
        len(kv_lens_N),
        _lines(blocks_NM, num_kv_heads),
        slice(num_keys),
        mask_N11L,
        seen,
    )


def _plan_prefill(
    start: int,
    end: int,
    blocks_M: Int64s,
    kv_len: int,
    num_kv_heads: int,
    block_size: int,
    params: AttentionParams,
) -> _Prefill:
    num_queries, window = end - start, params.window
    if kv_len == num_queries and (window is None or window >= kv_len):
        lines = _lines(blocks_M[None, : -(-kv_len // block_size)], num_kv_heads)
        return _Prefill(start, end, lines, slice(kv_len), None)

    first_position = kv_len - num_queries
    first_key = int(_first_key(first_position, params))
    first_block, offset = divmod(first_key, block_size)
    # Compared as they are: a difference would be eight bytes for each query and key.
    query_Q1, key_L = np.arange(first_position, kv_len)[:, None], np.arange(first_key, kv_len)
    seen_QL = query_Q1 >= key_L
    if params.has_chunks:
        seen_QL &= key_L >= _first_key(query_Q1, params)
    elif window is not None:
        seen_QL &= query_Q1 < key_L + window
    lines = _lines(blocks_M[None, first_block : -(-kv_len // block_size)], num_kv_heads)
    keys = slice(offset, offset + kv_len - first_key)
    return _Prefill(start, end, lines, keys, torch.from_numpy(seen_QL))
