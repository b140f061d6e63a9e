"""Choosing experts in one launch.

Legend: T tokens, E experts, S slots, K experts of a token, G groups of experts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.moe.reference import Routing, route
from penstock.kernels.op import arch


@triton.jit
def _route(
    logits_ptr, correction_ptr, slot_of_ptr, load_ptr, slots_ptr, weights_ptr, stride_t, scale,
    E: tl.constexpr, K: tl.constexpr, G: tl.constexpr, ACTIVE_GROUPS: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_E: tl.constexpr,
    BEST_TWO: tl.constexpr, IS_SIGMOID: tl.constexpr, HAS_CORRECTION: tl.constexpr,
    RENORMALIZE: tl.constexpr,
):  # fmt: skip
    """The K largest scores of a row, one after the other; one program per token.

    Scores lie as [group, expert of the group]; where two are equal the first one counts.
    """
    token = tl.program_id(0).to(tl.int64)
    groups, within = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_E)
    inside = (groups[:, None] < G) & (within[None, :] < E // G)
    numbers = groups[:, None] * (E // G) + within[None, :]
    logits = tl.load(logits_ptr + token * stride_t + numbers, mask=inside, other=float("-inf"))
    if IS_SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        scores = tl.exp(logits - tl.max(tl.max(logits, 1), 0))
        scores = scores / tl.sum(tl.sum(scores, 1), 0)
    rank = scores
    if HAS_CORRECTION:
        rank += tl.load(correction_ptr + numbers, mask=inside, other=0.0)
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

    places = tl.arange(0, BLOCK_K)
    experts, weights = tl.zeros((BLOCK_K,), tl.int32), tl.zeros((BLOCK_K,), tl.float32)
    for k in tl.static_range(K):
        is_best = rank == tl.max(tl.max(rank, 1), 0)
        # A row of NaN has no best one, and must not lead out of the table.
        expert = tl.minimum(tl.min(tl.min(tl.where(is_best, numbers, E), 1), 0), E - 1)
        is_chosen = (numbers == expert) & inside
        score = tl.sum(tl.sum(tl.where(is_chosen, scores, 0.0), 1), 0)
        experts, weights = (
            tl.where(places == k, expert, experts),
            tl.where(places == k, score, weights),
        )
        rank = tl.where(is_chosen, float("-inf"), rank)
    if RENORMALIZE:
        weights = weights / (tl.sum(weights, 0) + 1e-20)

    taken = places < K
    slots = tl.load(slot_of_ptr + experts, mask=taken, other=0)
    tl.store(slots_ptr + token * K + places, slots, mask=taken)
    tl.store(weights_ptr + token * K + places, weights * scale, mask=taken)
    tl.atomic_add(load_ptr + slots, tl.full((BLOCK_K,), 1, tl.int64), mask=taken)


@route.impl(
    "triton",
    needs=arch(80),
    fits=lambda logits_TE, routing, *_: (
        logits_TE.dtype is torch.float32 and routing.num_best in (1, 2)
    ),
)
def route_triton(
    logits_TE: Tensor,
    routing: Routing,
    correction_E: Tensor | None,
    slot_of_E: Tensor,
    load_S: Tensor,
) -> tuple[Tensor, Tensor]:
    num_tokens, num_experts = logits_TE.shape
    assert logits_TE.stride(1) == 1 and num_experts % routing.num_groups == 0, logits_TE.shape
    slots_TK = slot_of_E.new_empty((num_tokens, routing.num_active))
    weights_TK = logits_TE.new_empty((num_tokens, routing.num_active))
    if num_tokens:
        _route[(num_tokens,)](
            logits_TE, correction_E, slot_of_E, load_S, slots_TK, weights_TK, logits_TE.stride(0),
            routing.scale, E=num_experts, K=routing.num_active, G=routing.num_groups,
            ACTIVE_GROUPS=routing.num_active_groups,
            BLOCK_K=triton.next_power_of_2(routing.num_active),
            BLOCK_G=triton.next_power_of_2(routing.num_groups),
            BLOCK_E=triton.next_power_of_2(num_experts // routing.num_groups),
            BEST_TWO=routing.num_best == 2 and num_experts > routing.num_groups,
            IS_SIGMOID=routing.score == "sigmoid", HAS_CORRECTION=correction_E is not None,
            RENORMALIZE=routing.renormalize, num_warps=1 if num_experts <= 128 else 2,
        )  # fmt: skip
    return slots_TK, weights_TK
