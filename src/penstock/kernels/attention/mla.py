"""Multi-head latent attention (MLA): references of its ops, and their CPU versions.

The cache holds one vector per token: a latent and a rotated key that all heads share. A head's key
is its own matrix times the latent, then the rotated part; its value is another matrix times the
latent. Attention over that can be computed in two ways with one result:

- absorbed: the query times the key matrix meets the latents themselves, and what comes out is an
  average of latents. No key is ever computed, which suits a decode: it reads a lot and computes
  little (`mla_decode`).
- unabsorbed: keys and values of all heads are computed, and a score costs D + R multiplications
  instead of C + R. This suits a prompt: `mla_attend`, called by `prefill` for the tokens of the
  step and then for what the cache knows before them, in pieces of bounded size.

Legend: T tokens, N entries, H heads of this rank, C latent size, R rotated channels, A = C + R,
D other channels of a head's query and key, V value size, E = D + V, L keys, P positions,
B blocks, S tokens per block.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.attention.sdpa import group_by_length
from penstock.kernels.forward_batch import ForwardBatch
from penstock.kernels.norm import rms_norm
from penstock.kernels.op import cpu, op
from penstock.kernels.rope.reference import rotate, write
from penstock.kernels.transfer import to_device

# Cached tokens whose keys and values are computed at once: 16 heads of 128 + 128 in bf16 take 32
# MiB.
PIECE_TOKENS = 4096
_ROWS = 256  # queries whose scores a CPU holds at once

_TRITON = "penstock.kernels.attention.mla_triton"


@op(gpu_module=_TRITON)
def mla_write(
    q_THR: Tensor,
    kv_TA: Tensor,
    weight_C: Tensor,
    eps: float,
    cos_sin_PR: Tensor,
    positions_T: Tensor,
    cache_BSA: Tensor,
    slots_T: Tensor,
    is_interleaved: bool,
) -> tuple[Tensor, Tensor]:
    """Rotated queries, and what the cache now holds of each token: [normed latent | rotated key].

    Interleaved channels are rotated as pairs (0, 1), (2, 3) ... and come out halves apart, as
    others are before: scores do not depend on the order. What is returned has not been rounded to
    the cache's dtype.
    """
    latent_TC, key_TR = kv_TA.split((len(weight_C), kv_TA.shape[1] - len(weight_C)), dim=1)
    key_T1R = key_TR.unsqueeze(1)
    if is_interleaved:
        q_THR, key_T1R = _halves_apart(q_THR), _halves_apart(key_T1R)
    key_TR = rotate(key_T1R, cos_sin_PR, positions_T).squeeze(1)
    kv_TA = torch.cat((rms_norm.reference(latent_TC, weight_C, eps), key_TR), dim=1)
    write(kv_TA.unsqueeze(1), cache_BSA.unsqueeze(1), slots_T, 1.0)
    return rotate(q_THR, cos_sin_PR, positions_T), kv_TA


def _halves_apart(x_TNR: Tensor) -> Tensor:
    return x_TNR.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


@op(gpu_module=_TRITON)
def mla_decode(
    q_NHC: Tensor,
    q_NHR: Tensor,
    cache_BSA: Tensor,
    rows_N: Tensor,
    kv_lens_N: Tensor,
    block_table_RM: Tensor,
    scale: float,
    max_kv_len: int,
    lse_NH: Tensor | None = None,
) -> Tensor:
    """out_NHC: latents of the kv_lens[n] cached tokens of row rows[n], weighted by
    softmax((q_c . latent + q_r . key) * scale), for all heads; in fp32, back in q's dtype.

    `lse_NH` (fp32) is given the logarithms of the sums of exponentials. Without it the result of an
    entry without tokens may be anything."""
    latent_size, block_size = q_NHC.shape[2], cache_BSA.shape[1]
    num_blocks = min(-(-max_kv_len // block_size), block_table_RM.shape[1])
    blocks_NM = block_table_RM[rows_N.long(), :num_blocks].long()
    seen_NL = torch.arange(num_blocks * block_size, device=rows_N.device) < kv_lens_N[:, None]
    kv_NLA = cache_BSA[blocks_NM].flatten(1, 2).float().masked_fill(~seen_NL[:, :, None], 0.0)
    q_NHA = torch.cat((q_NHC, q_NHR), dim=-1).float()
    scores_NHL = torch.einsum("nha,nla->nhl", q_NHA, kv_NLA) * scale
    scores_NHL = scores_NHL.masked_fill(~seen_NL[:, None], -torch.inf)
    if lse_NH is not None:
        lse_NH.copy_(scores_NHL.logsumexp(-1))
    weights_NHL = scores_NHL.softmax(-1)
    return (weights_NHL @ kv_NLA[:, :, :latent_size]).to(q_NHC.dtype)


@op(gpu_module=_TRITON)
def mla_project(x_THI: Tensor, weight_HOI: Tensor, kv_lens_T: Tensor, out_THO: Tensor) -> None:
    """out[t, h] = weight[h] x[t, h] for tokens that see something (kv_lens[t] > 0). The others'
    `out` is left as it is; where there are no others it takes no time."""
    new_THO = torch.einsum("thi,hoi->tho", x_THI.float(), weight_HOI.float())
    sees_T11 = (kv_lens_T > 0)[:, None, None]
    out_THO.copy_(torch.where(sees_T11, new_THO.to(out_THO.dtype), out_THO))


@op(gpu_module=_TRITON)
def mla_attend(
    q_THD: Tensor,
    q_THR: Tensor,
    kv_LHE: Tensor,
    key_LR: Tensor,
    query_starts_N1: Tensor,
    key_starts_N1: Tensor,
    out_THV: Tensor,
    lse_TH: Tensor,
    scale: float,
    is_causal: bool,
    merges: bool,
) -> None:
    """Queries of entry n, [query_starts[n], query_starts[n + 1]), attend to its keys alike.

    `kv_LHE` holds the keys' unrotated channels, then the values; `key_LR` the rotated channels of
    all heads. Causal: query i of an entry sees its keys 0 .. i. Writes the result to `out_THV` and
    the logarithm of the sum of exponentials to `lse_TH` (fp32). `merges`: these hold the result for
    other keys, and are given that for both; entries without keys are left as they are.
    """
    k_LHD, v_LHV = kv_LHE.float().split((q_THD.shape[2], out_THV.shape[2]), dim=2)
    scores_HTL = torch.einsum("thd,lhd->htl", q_THD.float(), k_LHD)
    scores_HTL = (scores_HTL + torch.einsum("thr,lr->htl", q_THR.float(), key_LR.float())) * scale
    is_of_NT, place_T = _members(query_starts_N1, len(q_THD))
    is_of_NL, place_L = _members(key_starts_N1, len(kv_LHE))
    v_LHV = v_LHV.masked_fill(~is_of_NL.any(0)[:, None, None], 0.0)  # of padding: may be NaN
    seen_TL = (is_of_NT.float().T @ is_of_NL.float()) > 0
    if is_causal:
        seen_TL &= place_L <= place_T[:, None]
    scores_HTL = scores_HTL.masked_fill(~seen_TL, -torch.inf)
    both_lse_TH = new_lse_TH = scores_HTL.logsumexp(-1).T
    weights_HTL = (scores_HTL - new_lse_TH.T[:, :, None]).exp().masked_fill(~seen_TL, 0.0)
    new_THV = torch.einsum("htl,lhv->thv", weights_HTL, v_LHV)
    if merges:
        both_lse_TH = torch.logaddexp(lse_TH, new_lse_TH)
        new_THV = new_THV * (new_lse_TH - both_lse_TH).exp()[:, :, None]
        new_THV += out_THV.float() * (lse_TH - both_lse_TH).exp()[:, :, None]
    is_taken_T = seen_TL.any(-1)
    out_THV.copy_(torch.where(is_taken_T[:, None, None], new_THV.to(out_THV.dtype), out_THV))
    lse_TH.copy_(torch.where(is_taken_T[:, None], both_lse_TH, lse_TH))


def _members(starts_N1: Tensor, num_all: int) -> tuple[Tensor, Tensor]:
    """Whether entry n has token (or key) x, and which of that entry's it is."""
    all_X, first_N1, end_N1 = (
        torch.arange(num_all, device=starts_N1.device),
        starts_N1[:-1, None],
        starts_N1[1:, None],
    )
    is_of_NX = (all_X >= first_N1) & (all_X < end_N1)
    return is_of_NX, all_X - (is_of_NX * first_N1).sum(0)


@mla_decode.impl("torch", needs=cpu())
def mla_decode_torch(
    q_NHC, q_NHR, cache_BSA, rows_N, kv_lens_N, block_table_RM, scale, max_kv_len, lse_NH=None
):
    """Entries of similar length together, so that little is gathered for nothing."""
    kv_lens = kv_lens_N.tolist()
    groups = group_by_length(kv_lens)
    if len(groups) == 1:
        return _decode_group(
            q_NHC, q_NHR, cache_BSA, rows_N, kv_lens_N, block_table_RM, scale, max(kv_lens), lse_NH
        )
    out_NHC = torch.empty_like(q_NHC, memory_format=torch.contiguous_format)
    for entries in groups:
        at = torch.tensor(entries)
        longest = max(kv_lens[entry] for entry in entries)
        lse = None if lse_NH is None else lse_NH[at]
        out_NHC[at] = _decode_group(
            q_NHC[at], q_NHR[at], cache_BSA, rows_N[at], kv_lens_N[at], block_table_RM, scale,
            longest, lse,
        )  # fmt: skip
        if lse_NH is not None:
            lse_NH[at] = lse
    return out_NHC


def _decode_group(
    q_NHC: Tensor,
    q_NHR: Tensor,
    cache_BSA: Tensor,
    rows_N: Tensor,
    kv_lens_N: Tensor,
    block_table_RM: Tensor,
    scale: float,
    longest: int,
    lse_NH: Tensor | None,
) -> Tensor:
    num_entries, _, latent_size = q_NHC.shape
    num_blocks, block_size, size = cache_BSA.shape
    blocks_NM = block_table_RM[rows_N, : -(-longest // block_size)]
    lines = cache_BSA.view(num_blocks, -1).index_select(0, blocks_NM.flatten())
    kv_NLA = lines.view(num_entries, -1, size)[:, :longest].to(q_NHC.dtype)
    q_NHA = torch.cat((q_NHC, q_NHR), dim=-1)
    scores_NHL = torch.bmm(q_NHA, kv_NLA.transpose(1, 2)).float().mul_(scale)
    if int(kv_lens_N.min()) < longest:
        hidden_NL = torch.arange(longest) >= kv_lens_N[:, None]
        scores_NHL.masked_fill_(hidden_NL[:, None], -torch.inf)
        kv_NLA = kv_NLA.masked_fill(hidden_NL[:, :, None], 0.0)
    if lse_NH is not None:
        lse_NH.copy_(scores_NHL.logsumexp(-1))
    weights_NHL = scores_NHL.softmax(-1).to(q_NHC.dtype)
    return torch.bmm(weights_NHL, kv_NLA[:, :, :latent_size])


@mla_attend.impl("torch", needs=cpu())
def mla_attend_torch(
    q_THD,
    q_THR,
    kv_LHE,
    key_LR,
    query_starts_N1,
    key_starts_N1,
    out_THV,
    lse_TH,
    scale,
    is_causal,
    merges,
):
    """One entry and some of its queries at a time."""
    size = q_THD.shape[2]
    query_starts, key_starts = query_starts_N1.tolist(), key_starts_N1.tolist()
    for entry, (first_key, end_key) in enumerate(pairwise(key_starts)):
        if first_key == end_key:
            continue
        keys = slice(first_key, end_key)
        rotated_LHR = key_LR[keys, None].expand(-1, kv_LHE.shape[1], -1)
        k_HLK = torch.cat((kv_LHE[keys, :, :size], rotated_LHR), dim=-1).transpose(0, 1)
        v_HLV = kv_LHE[keys, :, size:].transpose(0, 1)
        first, end = query_starts[entry], query_starts[entry + 1]
        for start in range(first, end, _ROWS):
            here = slice(start, min(start + _ROWS, end))
            num_seen = here.stop - first if is_causal else end_key - first_key
            q_HTK = torch.cat((q_THD[here], q_THR[here]), dim=-1).transpose(0, 1)
            scores_HTL = (q_HTK @ k_HLK[:, :num_seen].transpose(1, 2)).float().mul_(scale)
            if is_causal:
                unseen_TL = torch.ones(scores_HTL.shape[1:], dtype=torch.bool)
                scores_HTL.masked_fill_(unseen_TL.triu_(start - first + 1), -torch.inf)
            lse_HT = scores_HTL.logsumexp(-1)
            weights_HTL = scores_HTL.sub_(lse_HT[:, :, None]).exp_().to(q_THD.dtype)
            new_THV = (weights_HTL @ v_HLV[:, :num_seen]).transpose(0, 1)
            if merges:
                new_THV, lse_HT = _merged(out_THV[here], lse_TH[here].T, new_THV, lse_HT)
            out_THV[here], lse_TH[here] = new_THV, lse_HT.T


def _merged(
    old_THV: Tensor, old_lse_HT: Tensor, new_THV: Tensor, new_lse_HT: Tensor
) -> tuple[Tensor, Tensor]:
    lse_HT = torch.logaddexp(old_lse_HT, new_lse_HT)
    old_THV = old_THV * (old_lse_HT - lse_HT).exp().T[:, :, None]
    return old_THV + new_THV * (new_lse_HT - lse_HT).exp().T[:, :, None], lse_HT


@dataclass(frozen=True, slots=True)
class _Piece:
    """Cached tokens of the entries [first, end), one entry after the other."""

    first: int
    end: int
    slots: Tensor
    key_starts_N1: Tensor


@dataclass(frozen=True, slots=True)
class AbsorbedTokens:
    """Tokens of chunks that attend as decodes do: those behind a cached prefix. Found on the
    device, so that a graph can hold them."""

    rows_T: Tensor
    kv_lens_T: Tensor  # int32: what the token sees; 0: it is none of them


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """What `prefill` needs beside its tensors, the same for all layers of a step.

    What the cache knows from before the step is attended to in pieces, which the host cuts, or
    through `absorbed`.
    """

    query_starts_N1: Tensor  # of the entries behind the decodes, from the first of their tokens
    pieces: tuple[_Piece, ...] = ()
    absorbed: AbsorbedTokens | None = None


def prefill_plan(batch: ForwardBatch, block_size: int) -> PrefillPlan:
    """Of this step: built by the first layer that asks."""
    if PrefillPlan not in batch.plans:
        batch.plans[PrefillPlan] = plan_prefill(batch, block_size)
    plan: PrefillPlan = batch.plans[PrefillPlan]
    return plan


def plan_prefill(
    batch: ForwardBatch, block_size: int, piece_tokens: int = PIECE_TOKENS
) -> PrefillPlan:
    """From numbers that the host knows, or on the device: nothing waits for it."""
    if batch.cached_lens is None:
        return _plan_on_device(batch)
    lens = np.array(batch.cached_lens, np.int32)
    assert len(lens) == batch.num_entries - batch.num_decodes, batch.cached_lens
    assert (lens >= 0).all(), batch.cached_lens
    query_starts_N1 = batch.query_starts_N1[batch.num_decodes :] - batch.num_decodes
    ends = np.cumsum(lens, dtype=np.int32)
    if not len(ends) or not ends[-1]:
        return PrefillPlan(query_starts_N1, ())
    device = batch.rows_N.device
    entries = np.repeat(np.arange(len(lens), dtype=np.int32), lens)
    positions = np.arange(ends[-1], dtype=np.int32) - np.repeat(ends - lens, lens)
    cuts = range(0, int(ends[-1]), piece_tokens)
    starts = [np.append(0, np.clip(ends - cut, 0, piece_tokens)).astype(np.int32) for cut in cuts]
    entries_L, positions_L, *starts_N1 = (
        to_device(np.concatenate([entries, positions, *starts]), device)
        .split([len(entries), len(positions), *map(len, starts)])
    )  # fmt: skip
    rows_L = batch.rows_N[batch.num_decodes :][entries_L.long()].long()
    blocks_L = batch.block_table_RM[rows_L, (positions_L // block_size).long()].long()
    slots_L = blocks_L * block_size + positions_L % block_size
    pieces = []
    for cut, start_N1 in zip(cuts, starts_N1, strict=True):
        here = slice(cut, cut + piece_tokens)
        first, end = int(entries[here][0]), int(entries[here][-1]) + 1
        pieces.append(_Piece(first, end, slots_L[here], start_N1[first : end + 1]))
    return PrefillPlan(query_starts_N1, tuple(pieces))


def _plan_on_device(batch: ForwardBatch) -> PrefillPlan:
    first, num_tokens = batch.num_decodes, batch.num_tokens - batch.num_decodes
    query_starts_N1 = batch.query_starts_N1[first:] - first
    token_T = torch.arange(num_tokens, dtype=torch.int32, device=query_starts_N1.device)
    # Padding behind the last chunk: of the last entry, which has no tokens and so no prefix.
    entry_T = torch.searchsorted(query_starts_N1[1:].contiguous(), token_T, right=True)
    entry_T = entry_T.clamp(max=batch.num_entries - first - 1)
    has_prefix_N = batch.kv_lens_N[first:] > query_starts_N1.diff()
    sees_T = (batch.positions_T[first:] + 1).int()
    absorbed = AbsorbedTokens(
        rows_T=batch.rows_N[first:][entry_T],
        kv_lens_T=torch.where(has_prefix_N[entry_T], sees_T, 0),
    )
    return PrefillPlan(query_starts_N1, absorbed=absorbed)


def cached(cache_BSA: Tensor, slots_T: Tensor, dtype: torch.dtype) -> Tensor:
    """What the cache holds in these slots: kv_TA."""
    return cache_BSA.view(-1, cache_BSA.shape[2]).index_select(0, slots_T).to(dtype)


def prefill(
    q_THD: Tensor,
    q_THR: Tensor,
    kv_TA: Tensor,
    weight_HEC: Tensor,
    cache_BSA: Tensor,
    plan: PrefillPlan,
    value_size: int,
    scale: float,
    attend_op: Callable[..., None] = mla_attend,
) -> Tensor:
    """out_THV of the tokens behind the decodes, which `kv_TA` says as `mla_write` does. Those that
    the plan has as absorbed see no cached prefix here: they are the caller's.

    `weight_HEC` projects latents to keys and values.
    """
    num_tokens, num_heads, _ = q_THD.shape
    latent_size = weight_HEC.shape[2]
    dtype = torch.float32 if plan.pieces else q_THD.dtype
    out_THV = torch.empty((num_tokens, num_heads, value_size), dtype=dtype, device=q_THD.device)
    lse_TH = torch.empty((num_tokens, num_heads), dtype=torch.float32, device=q_THD.device)

    def attend(kv_LA: Tensor, query_starts_N1: Tensor, key_starts_N1: Tensor, is_own: bool) -> None:
        latent_LC, key_LR = kv_LA.split((latent_size, kv_LA.shape[1] - latent_size), dim=1)
        kv_LHE = F.linear(latent_LC, weight_HEC.flatten(0, 1)).unflatten(1, (num_heads, -1))
        attend_op(
            q_THD, q_THR, kv_LHE, key_LR, query_starts_N1, key_starts_N1, out_THV, lse_TH, scale,
            is_own, not is_own,
        )  # fmt: skip

    attend(kv_TA, plan.query_starts_N1, plan.query_starts_N1, True)
    for piece in plan.pieces:
        kv_LA = cached(cache_BSA, piece.slots, q_THD.dtype)
        attend(kv_LA, plan.query_starts_N1[piece.first : piece.end + 1], piece.key_starts_N1, False)
    return out_THV.to(q_THD.dtype)
