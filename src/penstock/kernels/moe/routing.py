"""The router on a GPU: logits in one launch, top-k in another.

Legend: T tokens, D hidden size, E experts, S slots, K experts of a token, G groups of experts.
"""

from dataclasses import dataclass

import torch
import triton.language as tl

from penstock.kernels.gemm.gemv import GemvConfig, gemv
from penstock.kernels.launch import jit
from penstock.kernels.moe.reference import route, router_logits
from penstock.kernels.op import arch
from penstock.kernels.pdl import launch_options, let_next_start, wait_for_previous
from penstock.kernels.sizes import cdiv, next_power_of_2
from penstock.kernels.triton_math import dot, sigmoid

_MAX_GEMV_TOKENS = 4
_MAX_SMALL_TILES = 256  # more are faster as a quarter as many larger ones


@dataclass(frozen=True, slots=True)
class LogitsConfig:
    """Launch config."""

    tokens: int  # of a program
    experts: int
    parts: int  # of the inputs
    depth: int  # inputs of a part at once
    num_warps: int
    num_stages: int


@router_logits.impl(
    "gemv", needs=arch(80), fits=lambda x_TD, *_: 0 < x_TD.shape[0] <= _MAX_GEMV_TOKENS
)
def router_logits_gemv(x_TD, weight_ED, bias_E):
    """An expert for each program, all of its weights in flight before x is there (PDL)."""
    block = min(next_power_of_2(x_TD.shape[1]), 4096)
    config = GemvConfig(rows=1, block=block, num_warps=8)
    return gemv(x_TD, None, weight_ED, None, bias_E, torch.float32, config=config)


@jit(do_not_specialize=["num_tokens"])
def _logits(
    x_ptr, w_ptr, bias_ptr, out_ptr, num_tokens, stride_x, stride_w,
    D: tl.constexpr, E: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr, HAS_BIAS: tl.constexpr, ON_GPU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[t, e] = x[t] . w[e] + bias[e]; one program per tile of tokens and experts."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    experts = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    tokens = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_token, is_expert = (tokens < num_tokens)[:, None], (experts < E)[None, :]
    x_ptr += tokens.to(tl.int64)[:, None] * stride_x
    w_ptr += experts[None, :] * stride_w
    acc = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
    for start in range(0, D, BLOCK_D):
        inputs = start + tl.arange(0, BLOCK_D)
        x_mask = is_token & (inputs < D)[None, :]
        w_mask = (inputs < D)[:, None] & is_expert
        x = tl.load(x_ptr + inputs[None, :], mask=x_mask, other=0.0)
        w = tl.load(w_ptr + inputs[:, None], mask=w_mask, other=0.0)
        acc = dot(x, w, acc, ON_GPU)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + experts, mask=experts < E, other=0.0).to(tl.float32)[None, :]
    out_ptr += tokens.to(tl.int64)[:, None] * E + experts[None, :]
    tl.store(out_ptr, acc, mask=is_token & is_expert)


@jit(do_not_specialize=["num_tokens"])
def _logits_sliced_k(
    x_ptr, w_ptr, bias_ptr, out_ptr, num_tokens, stride_x, stride_w,
    D: tl.constexpr, E: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_D: tl.constexpr, HAS_BIAS: tl.constexpr, ON_GPU: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The same with sliced K: each part of the inputs has warps of its own. With few programs most
    of the time is MMAs that wait for the accumulator of the one before."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    experts = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    tokens = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_token, is_expert = (tokens < num_tokens)[:, None], (experts < E)[None, :]
    x_ptr += tokens.to(tl.int64)[None, :, None] * stride_x
    w_ptr += experts[None, None, :] * stride_w
    acc = tl.zeros((PARTS, BLOCK_T, BLOCK_E), tl.float32)
    of_parts = tl.arange(0, PARTS)[:, None] * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    for start in range(0, D, PARTS * BLOCK_D):
        inputs = start + of_parts
        x_mask = is_token[None, :, :] & (inputs < D)[:, None, :]
        w_mask = (inputs < D)[:, :, None] & is_expert[None, :, :]
        x = tl.load(x_ptr + inputs[:, None, :], mask=x_mask, other=0.0)
        w = tl.load(w_ptr + inputs[:, :, None], mask=w_mask, other=0.0)
        acc = dot(x, w, acc, ON_GPU)
    y = tl.sum(acc, 0)
    if HAS_BIAS:
        y += tl.load(bias_ptr + experts, mask=experts < E, other=0.0).to(tl.float32)[None, :]
    out_ptr += tokens.to(tl.int64)[:, None] * E + experts[None, :]
    tl.store(out_ptr, y, mask=is_token & is_expert)


def logits_config(num_tokens: int, num_experts: int) -> LogitsConfig:
    """The weights are small and lie in the cache: the more programs read them, the better."""
    num_small = cdiv(num_tokens, 16) * cdiv(num_experts, 16)
    if num_small <= _MAX_SMALL_TILES:
        return LogitsConfig(tokens=16, experts=16, parts=4, depth=64, num_warps=4, num_stages=6)
    return LogitsConfig(tokens=64, experts=64, parts=1, depth=128, num_warps=4, num_stages=3)


@router_logits.impl(
    "gemm",
    needs=arch(80),
    fits=lambda x_TD, weight_ED, bias_E: (
        x_TD.shape[0] > 0 and x_TD.dtype == weight_ED.dtype and x_TD.element_size() == 2
    ),
)
def router_logits_gemm(x_TD, weight_ED, bias_E, config: LogitsConfig | None = None):
    """On tensor cores: 16-bit factors multiply exactly, and accumulate in fp32."""
    (num_tokens, size), num_experts = x_TD.shape, weight_ED.shape[0]
    assert x_TD.stride(1) == weight_ED.stride(1) == 1, (x_TD.stride(), weight_ED.stride())
    c = config or logits_config(num_tokens, num_experts)
    out_TE = x_TD.new_empty((num_tokens, num_experts), dtype=torch.float32)
    kernel, parts = (_logits, {}) if c.parts == 1 else (_logits_sliced_k, {"PARTS": c.parts})
    kernel[(cdiv(num_experts, c.experts), cdiv(num_tokens, c.tokens))](
        x_TD, weight_ED, bias_E, out_TE, num_tokens, x_TD.stride(0), weight_ED.stride(0),
        D=size, E=num_experts, BLOCK_T=c.tokens, BLOCK_E=c.experts, BLOCK_D=c.depth, **parts,
        HAS_BIAS=bias_E is not None, ON_GPU=x_TD.is_cuda, num_warps=c.num_warps,
        num_stages=c.num_stages, **launch_options(x_TD),
    )  # fmt: skip
    return out_TE


@jit
def _route(
    logits_ptr, correction_ptr, slot_of_ptr, load_ptr, slots_ptr, weights_ptr, stride_t, scale,
    E: tl.constexpr, K: tl.constexpr, G: tl.constexpr, ACTIVE_GROUPS: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_E: tl.constexpr,
    BEST_TWO: tl.constexpr, IS_SIGMOID: tl.constexpr, HAS_CORRECTION: tl.constexpr,
    RENORMALIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The K largest scores of a row, one after the other; one program per token.

    Scores lie as [group, expert of the group]; where two are equal the first one counts. They are
    compared as integers, of which a warp finds the largest in one instruction.
    """
    let_next_start(PDL)
    token = tl.program_id(0).to(tl.int64)
    groups, within = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_E)
    inside = (groups[:, None] < G) & (within[None, :] < E // G)
    numbers = groups[:, None] * (E // G) + within[None, :]
    slot_of = tl.load(slot_of_ptr + numbers, mask=inside, other=0)
    if HAS_CORRECTION:
        correction = tl.load(correction_ptr + numbers, mask=inside, other=0.0)
    wait_for_previous(PDL)
    logits = tl.load(logits_ptr + token * stride_t + numbers, mask=inside, other=float("-inf"))
    if IS_SIGMOID:
        scores = sigmoid(logits)
    else:
        scores = tl.exp(logits - tl.max(tl.max(logits, 1), 0))
        scores = scores / tl.sum(tl.sum(scores, 1), 0)
    rank = scores
    if HAS_CORRECTION:
        rank += correction
    rank = tl.where(inside, rank, float("-inf"))

    if ACTIVE_GROUPS < G:
        best = tl.max(rank, 1)
        if BEST_TWO:
            first = tl.min(tl.where(rank == best[:, None], numbers, E), 1)
            best += tl.max(tl.where(numbers == first[:, None], float("-inf"), rank), 1)
        is_open = groups < 0
        for _ in tl.static_range(ACTIVE_GROUPS):
            group = tl.min(tl.where(best == tl.max(best, 0), groups, G), 0)
            is_open = is_open | (groups == group)
            best = tl.where(groups == group, float("-inf"), best)
        rank = tl.where(is_open[:, None], rank, float("-inf"))

    SIZE: tl.constexpr = BLOCK_G * BLOCK_E
    NONE: tl.constexpr = -(1 << 31)
    bits = rank.to(tl.int32, bitcast=True)
    bits ^= (bits >> 31) & 0x7FFFFFFF  # ordered as the floats are; NaN before or behind all others
    keys = tl.reshape(tl.where(inside, tl.maximum(bits, NONE + 1), NONE), (SIZE,))
    all_places, chosen = tl.arange(0, SIZE), tl.arange(0, BLOCK_K)
    places = tl.zeros((BLOCK_K,), tl.int32)
    for k in tl.static_range(K):
        place = tl.min(tl.where(keys == tl.max(keys, 0), all_places, SIZE), 0)
        places = tl.where(chosen == k, place, places)
        keys = tl.where(all_places == place, NONE, keys)
    weights = tl.where(chosen < K, tl.gather(tl.reshape(scores, (SIZE,)), places, 0), 0.0)
    if RENORMALIZE:
        weights = weights / (tl.sum(weights, 0) + 1e-20)

    taken = chosen < K
    slots = tl.gather(tl.reshape(slot_of, (SIZE,)), places, 0)
    tl.store(slots_ptr + token * K + chosen, slots, mask=taken)
    tl.store(weights_ptr + token * K + chosen, weights * scale, mask=taken)
    tl.atomic_add(load_ptr + slots, tl.full((BLOCK_K,), 1, tl.int64), mask=taken)


@route.impl(
    "triton",
    needs=arch(80),
    fits=lambda logits_TE, routing, *_: (
        logits_TE.dtype is torch.float32 and routing.num_best in (1, 2)
    ),
)
def route_triton(logits_TE, routing, correction_E, slot_of_E, load_S):
    num_tokens, num_experts = logits_TE.shape
    assert logits_TE.stride(1) == 1 and num_experts % routing.num_groups == 0, logits_TE.shape
    slots_TK = slot_of_E.new_empty((num_tokens, routing.num_active))
    weights_TK = logits_TE.new_empty((num_tokens, routing.num_active))
    if num_tokens:
        _route[(num_tokens,)](
            logits_TE, correction_E, slot_of_E, load_S, slots_TK, weights_TK, logits_TE.stride(0),
            routing.scale, E=num_experts, K=routing.num_active, G=routing.num_groups,
            ACTIVE_GROUPS=routing.num_active_groups,
            BLOCK_K=next_power_of_2(routing.num_active),
            BLOCK_G=next_power_of_2(routing.num_groups),
            BLOCK_E=next_power_of_2(num_experts // routing.num_groups),
            BEST_TWO=routing.num_best == 2 and num_experts > routing.num_groups,
            IS_SIGMOID=routing.score == "sigmoid", HAS_CORRECTION=correction_E is not None,
            RENORMALIZE=routing.renormalize, num_warps=1, **launch_options(logits_TE),
        )  # fmt: skip
    return slots_TK, weights_TK
