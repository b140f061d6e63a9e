"""Experts on a GPU. Only weights of experts that have tokens are read, and no count leaves the GPU.

A few tokens: each pair of a token and an expert is a product of its own, as quick as the weights
can be read. More: pairs are sorted by expert into blocks of rows, of which each has one expert; the
number of blocks is that of the worst case, and those that stay empty end at once.

Legend: T tokens, S slots, K experts of a token, P = T * K pairs, B blocks of pairs, M pairs of a
block, D hidden size, F features of an expert; N outputs of either product.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.moe.gate import Gate
from penstock.kernels.moe.reference import experts
from penstock.kernels.op import arch

MAX_FEW = 4  # tokens that are computed pair by pair
_PAIRS = 256  # of one program that counts or sorts


@triton.jit
def _gate(gate, up, alpha, shift, limit):
    gate, up = tl.minimum(gate, limit), tl.minimum(tl.maximum(up, -limit), limit)
    return (up + shift) * gate / (1.0 + tl.exp(-alpha * gate))


@triton.jit
def _dot(x, w, acc, ON_GPU: tl.constexpr):
    if not ON_GPU:  # the interpreter takes bfloat16 for whole numbers
        x, w = x.to(tl.float32), w.to(tl.float32)
    return tl.dot(x, w, acc, input_precision="ieee")


@triton.jit
def _gate_up_few(
    x_ptr, slots_ptr, w_ptr, bias_ptr, h_ptr, stride_x, F, D, alpha, shift, limit,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """h[pair, f] = gate(x[token] . w[slot, f], x[token] . w[slot, F + f]); one program per pair and
    ROWS features."""
    pair = tl.program_id(0).to(tl.int64)
    features = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_feature = features < F
    slot = tl.load(slots_ptr + pair).to(tl.int64)
    x_ptr += pair // K * stride_x
    w_ptr += slot * 2 * F * D
    gate, up = tl.zeros((ROWS, BLOCK), tl.float32), tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, D, BLOCK):
        at = start + tl.arange(0, BLOCK)
        mask = is_feature[:, None] & (at < D)[None, :]
        x = tl.load(x_ptr + at, mask=at < D, other=0.0).to(tl.float32)[None, :]
        w_at = w_ptr + features[:, None] * D + at[None, :]
        gate += tl.load(w_at, mask=mask, other=0.0).to(tl.float32) * x
        up += tl.load(w_at + F * D, mask=mask, other=0.0).to(tl.float32) * x
    gate, up = tl.sum(gate, 1), tl.sum(up, 1)
    if HAS_BIAS:
        bias_ptr += slot * 2 * F + features
        gate += tl.load(bias_ptr, mask=is_feature, other=0.0).to(tl.float32)
        up += tl.load(bias_ptr + F, mask=is_feature, other=0.0).to(tl.float32)
    h = _gate(gate, up, alpha, shift, limit)
    tl.store(h_ptr + pair * F + features, h.to(h_ptr.dtype.element_ty), mask=is_feature)


@triton.jit
def _down_few(
    h_ptr, slots_ptr, weights_ptr, w_ptr, bias_ptr, y_ptr, D, F,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """y[token, d] = sum over its pairs of weight * (h[pair] . w[slot, d]); one program per token
    and ROWS channels."""
    token = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_channel = channels < D
    total, y = tl.zeros((ROWS, BLOCK), tl.float32), tl.zeros((ROWS,), tl.float32)
    for k in range(K):
        pair = token * K + k
        slot = tl.load(slots_ptr + pair).to(tl.int64)
        weight = tl.load(weights_ptr + pair)
        for start in range(0, F, BLOCK):
            at = start + tl.arange(0, BLOCK)
            mask = is_channel[:, None] & (at < F)[None, :]
            h = tl.load(h_ptr + pair * F + at, mask=at < F, other=0.0).to(tl.float32)[None, :]
            w_at = w_ptr + slot * D * F + channels[:, None] * F + at[None, :]
            total += weight * h * tl.load(w_at, mask=mask, other=0.0).to(tl.float32)
        if HAS_BIAS:
            bias = tl.load(bias_ptr + slot * D + channels, mask=is_channel, other=0.0)
            y += weight * bias.to(tl.float32)
    y += tl.sum(total, 1)
    tl.store(y_ptr + token * D + channels, y.to(y_ptr.dtype.element_ty), mask=is_channel)


@triton.jit(do_not_specialize=["num_pairs"])
def _count(slots_ptr, counts_ptr, num_pairs, BLOCK: tl.constexpr):
    """counts[slot] = how many pairs have it."""
    pairs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = pairs < num_pairs
    slots = tl.load(slots_ptr + pairs, mask=inside, other=0)
    tl.atomic_add(counts_ptr + slots, tl.full((BLOCK,), 1, tl.int32), mask=inside)


@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])
def _plan(
    counts_ptr, next_ptr, block_slots_ptr, pairs_ptr, num_pairs, num_blocks, S,
    M: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """Each slot gets the blocks behind those of the slots before it. Writes next[slot] = its first
    place, block_slots[block] (S or more: empty), and num_pairs, no pair, into every place; one
    program per BLOCK_B blocks."""
    slots = tl.arange(0, BLOCK_S)
    counts = tl.load(counts_ptr + slots, mask=slots < S, other=0)
    num_each = (counts + M - 1) // M
    ends = tl.cumsum(num_each, 0)
    if tl.program_id(0) == 0:
        tl.store(next_ptr + slots, (ends - num_each) * M, mask=slots < S)
    blocks = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    slot_of = tl.sum((ends[None, :] <= blocks[:, None]).to(tl.int32), 1)
    tl.store(block_slots_ptr + blocks, slot_of, mask=blocks < num_blocks)
    places = tl.program_id(0) * BLOCK_B * M + tl.arange(0, BLOCK_B * M)
    none = tl.full((BLOCK_B * M,), 0, tl.int32) + num_pairs
    tl.store(pairs_ptr + places, none, mask=places < num_blocks * M)


@triton.jit(do_not_specialize=["num_pairs"])
def _place(slots_ptr, next_ptr, pairs_ptr, num_pairs, BLOCK: tl.constexpr):
    """Every pair takes the next place of its slot; the order within a slot does not matter."""
    pairs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = pairs < num_pairs
    slots = tl.load(slots_ptr + pairs, mask=inside, other=0)
    places = tl.atomic_add(next_ptr + slots, tl.full((BLOCK,), 1, tl.int32), mask=inside)
    tl.store(pairs_ptr + places, pairs, mask=inside)


@triton.jit(do_not_specialize=["num_pairs"])
def _grouped(
    x_ptr, w_ptr, bias_ptr, weights_ptr, y_ptr, pairs_ptr, block_slots_ptr, stride_x,
    num_pairs, S, N, num_inputs, alpha, shift, limit,
    PAIRS_PER_ROW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_I: tl.constexpr, IS_GATED: tl.constexpr, HAS_BIAS: tl.constexpr,
    ON_GPU: tl.constexpr,
):  # fmt: skip
    """A block of pairs times some outputs of its slot's matrix.

    Gated: y[pair, n] = gate(x . w[slot, n], x . w[slot, N + n]), else weight * (x . w[slot, n]),
    with x = x[pair // PAIRS_PER_ROW].
    """
    slot = tl.load(block_slots_ptr + tl.program_id(1)).to(tl.int64)
    if slot >= S:
        return
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    pairs = tl.load(pairs_ptr + rows).to(tl.int64)
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_pair, is_output = pairs < num_pairs, outputs < N
    x_rows = x_ptr + (pairs // PAIRS_PER_ROW)[:, None] * stride_x
    w_ptr += slot * (2 * N if IS_GATED else N) * num_inputs
    w_columns = w_ptr + outputs[None, :].to(tl.int64) * num_inputs
    y = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, num_inputs, BLOCK_I):
        at = start + tl.arange(0, BLOCK_I)
        is_input = at < num_inputs
        mask = is_pair[:, None] & is_input[None, :]
        x = tl.load(x_rows + at[None, :], mask=mask, other=0.0)
        mask = is_input[:, None] & is_output[None, :]
        w = tl.load(w_columns + at[:, None], mask=mask, other=0.0)
        y = _dot(x, w, y, ON_GPU)
        if IS_GATED:
            w = tl.load(w_columns + N * num_inputs + at[:, None], mask=mask, other=0.0)
            up = _dot(x, w, up, ON_GPU)
    if HAS_BIAS:
        bias_ptr += slot * (2 * N if IS_GATED else N) + outputs
        y += tl.load(bias_ptr, mask=is_output, other=0.0).to(tl.float32)[None, :]
        if IS_GATED:
            up += tl.load(bias_ptr + N, mask=is_output, other=0.0).to(tl.float32)[None, :]
    if IS_GATED:
        y = _gate(y, up, alpha, shift, limit)
    else:
        y *= tl.load(weights_ptr + pairs, mask=is_pair, other=0.0)[:, None]
    y_at = y_ptr + pairs[:, None] * N + outputs[None, :]
    mask = is_pair[:, None] & is_output[None, :]
    tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _sum_pairs(pairs_ptr, y_ptr, D, K: tl.constexpr, BLOCK: tl.constexpr):
    """y[token] = sum of its pairs; one program per token and block of channels."""
    token = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channels < D
    y = tl.zeros((BLOCK,), tl.float32)
    for k in range(K):
        at = pairs_ptr + (token * K + k) * D + channels
        y += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + token * D + channels, y.to(y_ptr.dtype.element_ty), mask=inside)


def _check(x_TD: Tensor, *contiguous: Tensor | None) -> None:
    assert x_TD.stride(1) == 1, x_TD.stride()
    assert all(t is None or t.is_contiguous() for t in contiguous)


@experts.impl("triton few", needs=arch(80), fits=lambda x_TD, *_: 0 < x_TD.shape[0] <= MAX_FEW)
def experts_few(
    x_TD: Tensor,
    slots_TK: Tensor,
    weights_TK: Tensor,
    gate_up_S2FD: Tensor,
    down_SDF: Tensor,
    gate_up_bias_S2F: Tensor | None,
    down_bias_SD: Tensor | None,
    gate: Gate,
) -> Tensor:
    _check(x_TD, slots_TK, weights_TK, gate_up_S2FD, down_SDF, gate_up_bias_S2F, down_bias_SD)
    (num_tokens, num_active), (_, size, num_features) = slots_TK.shape, down_SDF.shape
    h_PF = x_TD.new_empty((num_tokens * num_active, num_features))
    y_TD = x_TD.new_empty((num_tokens, size))
    rows = 4
    _gate_up_few[(h_PF.shape[0], triton.cdiv(num_features, rows))](
        x_TD, slots_TK, gate_up_S2FD, gate_up_bias_S2F, h_PF, x_TD.stride(0), num_features, size,
        gate.alpha, gate.shift, gate.limit, K=num_active, ROWS=rows,
        BLOCK=min(512, triton.next_power_of_2(size)), HAS_BIAS=gate_up_bias_S2F is not None,
        num_warps=4,
    )  # fmt: skip
    _down_few[(num_tokens, triton.cdiv(size, rows))](
        h_PF, slots_TK, weights_TK, down_SDF, down_bias_SD, y_TD, size, num_features,
        K=num_active, ROWS=rows, BLOCK=min(512, triton.next_power_of_2(num_features)),
        HAS_BIAS=down_bias_SD is not None, num_warps=4,
    )  # fmt: skip
    return y_TD


def sorted_pairs(slots_TK: Tensor, num_slots: int, block: int) -> tuple[Tensor, Tensor]:
    """(pairs_BM, block_slots_B): the pairs in blocks of one slot each; P where there is no pair.

    B is the most there can be: every slot may have one block that is not full.
    """
    num_pairs, device = slots_TK.numel(), slots_TK.device
    num_blocks = num_pairs // block + min(num_slots, num_pairs)
    counts_S = torch.zeros(num_slots, dtype=torch.int32, device=device)
    next_S = torch.empty_like(counts_S)
    block_slots_B = torch.empty(num_blocks, dtype=torch.int32, device=device)
    pairs_BM = torch.empty((num_blocks, block), dtype=torch.int32, device=device)
    grid = (triton.cdiv(num_pairs, _PAIRS),)
    _count[grid](slots_TK, counts_S, num_pairs, BLOCK=_PAIRS, num_warps=4)
    blocks_each = 16
    _plan[(triton.cdiv(num_blocks, blocks_each),)](
        counts_S, next_S, block_slots_B, pairs_BM, num_pairs, num_blocks, num_slots,
        M=block, BLOCK_S=triton.next_power_of_2(num_slots), BLOCK_B=blocks_each, num_warps=4,
    )  # fmt: skip
    _place[grid](slots_TK, next_S, pairs_BM, num_pairs, BLOCK=_PAIRS, num_warps=4)
    return pairs_BM, block_slots_B


def _rows_per_block(num_pairs: int, num_slots: int) -> int:
    """About as many as an expert has on average: fewer read weights again, more stay empty."""
    return min(max(triton.next_power_of_2(num_pairs // num_slots), 16), 128)


@experts.impl("triton grouped", needs=arch(80), fits=lambda x_TD, *_: x_TD.shape[0] > 0)
def experts_grouped(
    x_TD: Tensor,
    slots_TK: Tensor,
    weights_TK: Tensor,
    gate_up_S2FD: Tensor,
    down_SDF: Tensor,
    gate_up_bias_S2F: Tensor | None,
    down_bias_SD: Tensor | None,
    gate: Gate,
) -> Tensor:
    _check(x_TD, slots_TK, weights_TK, gate_up_S2FD, down_SDF, gate_up_bias_S2F, down_bias_SD)
    (num_tokens, num_active), (num_slots, size, num_features) = slots_TK.shape, down_SDF.shape
    num_pairs = num_tokens * num_active
    rows = _rows_per_block(num_pairs, num_slots)
    pairs_BM, block_slots_B = sorted_pairs(slots_TK, num_slots, rows)
    h_PF = x_TD.new_empty((num_pairs, num_features))
    y_PD = x_TD.new_empty((num_pairs, size))
    y_TD = x_TD.new_empty((num_tokens, size))
    columns, depth = 64, 32 if x_TD.dtype is torch.float32 else 64
    for is_gated, x, weight, bias, out in (
        (True, x_TD, gate_up_S2FD, gate_up_bias_S2F, h_PF),
        (False, h_PF, down_SDF, down_bias_SD, y_PD),
    ):
        _grouped[(triton.cdiv(out.shape[1], columns), len(block_slots_B))](
            x, weight, bias, weights_TK, out, pairs_BM, block_slots_B, x.stride(0),
            num_pairs, num_slots, out.shape[1], weight.shape[2],
            gate.alpha, gate.shift, gate.limit, PAIRS_PER_ROW=num_active if is_gated else 1,
            BLOCK_M=rows, BLOCK_N=columns, BLOCK_I=depth, IS_GATED=is_gated,
            HAS_BIAS=bias is not None, ON_GPU=x.is_cuda, num_warps=4, num_stages=3,
        )  # fmt: skip
    block = min(1024, triton.next_power_of_2(size))
    _sum_pairs[(num_tokens, triton.cdiv(size, block))](
        y_PD, y_TD, size, K=num_active, BLOCK=block, num_warps=4
    )
    return y_TD
