"""Choosing experts and applying them: the references against transformers, sorting by its rules."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DeepseekV3Config, GptOssConfig, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, GptOssTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts, Qwen3MoeTopKRouter

from penstock.kernels.moe import SILU, Gate, Routing, experts, route

pytest.importorskip("triton")
SIZE, NUM_EXPERTS = 24, 16


def randomised(module: torch.nn.Module) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(3)
    for tensor in [*module.parameters(), *module.buffers()]:
        tensor.data.normal_(0.0, 0.3, generator=generator)
    return module.eval().requires_grad_(False)


def routed(logits: torch.Tensor, routing: Routing, correction: torch.Tensor | None = None):
    """(experts, weights, tokens of each expert)"""
    load = torch.zeros(NUM_EXPERTS, dtype=torch.int64)
    slots = torch.arange(NUM_EXPERTS, dtype=torch.int32)
    return *route.reference(logits, routing, correction, slots, load), load


def assert_same_choice(ours, theirs) -> None:
    """Whatever the order of a token's experts."""
    (ids, weights), (their_ids, their_weights) = ours, theirs
    for mine, other in ((ids, their_ids), (weights, their_weights)):
        assert mine.shape == other.shape
    order, their_order = ids.argsort(1), their_ids.argsort(1)
    assert torch.equal(ids.gather(1, order).long(), their_ids.gather(1, their_order))
    torch.testing.assert_close(weights.gather(1, order), their_weights.gather(1, their_order))


@pytest.mark.parametrize("renormalize", [False, True])
def test_softmax_choice_is_that_of_qwen(renormalize):
    config = Qwen3MoeConfig(
        hidden_size=SIZE, num_experts=NUM_EXPERTS, num_experts_per_tok=5, norm_topk_prob=renormalize
    )
    router, x = randomised(Qwen3MoeTopKRouter(config)), torch.randn(9, SIZE)
    logits, weights, ids = router(x)
    *ours, load = routed(logits, Routing(num_active=5, renormalize=renormalize))
    assert_same_choice(ours, (ids, weights))
    assert torch.equal(load, torch.bincount(ids.flatten(), minlength=NUM_EXPERTS))


def test_softmax_of_the_chosen_is_that_of_gpt_oss():
    config = GptOssConfig(
        hidden_size=SIZE, num_local_experts=NUM_EXPERTS, num_experts_per_tok=4, num_hidden_layers=1
    )
    logits, weights, ids = randomised(GptOssTopKRouter(config))(torch.randn(9, SIZE))
    *ours, _ = routed(logits, Routing(num_active=4, renormalize=True))
    assert_same_choice(ours, (ids, weights))


@pytest.mark.parametrize(("num_groups", "num_active_groups"), [(1, 1), (4, 2), (8, 3)])
@pytest.mark.parametrize("renormalize", [False, True])
def test_sigmoid_choice_within_groups_is_that_of_deepseek(
    num_groups, num_active_groups, renormalize
):
    config = DeepseekV3Config(
        hidden_size=SIZE,
        n_routed_experts=NUM_EXPERTS,
        num_experts_per_tok=4,
        n_group=num_groups,
        topk_group=num_active_groups,
        norm_topk_prob=renormalize,
        routed_scaling_factor=2.5,
    )
    router, x = randomised(DeepseekV3TopkRouter(config)), torch.randn(40, SIZE)
    logits, weights, ids = router(x)
    routing = Routing(
        num_active=4,
        score="sigmoid",
        renormalize=renormalize,
        scale=2.5,
        num_groups=num_groups,
        num_active_groups=num_active_groups,
    )
    *ours, _ = routed(logits, routing, router.e_score_correction_bias)
    assert_same_choice(ours, (ids, weights))


def choice(num_tokens: int, num_active: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.rand(num_tokens, NUM_EXPERTS).topk(num_active).indices
    return ids, torch.rand(num_tokens, num_active)


def test_gated_experts_are_those_of_qwen():
    config = Qwen3MoeConfig(
        hidden_size=SIZE,
        num_experts=NUM_EXPERTS,
        moe_intermediate_size=20,
        experts_implementation="eager",
    )
    theirs, x = randomised(Qwen3MoeExperts(config)), torch.randn(7, SIZE)
    ids, weights = choice(7, 3)
    ours = experts.reference(
        x, ids.int(), weights, theirs.gate_up_proj, theirs.down_proj, None, None, SILU
    )
    torch.testing.assert_close(ours, theirs(x, ids, weights))


def test_clamped_experts_with_biases_are_those_of_gpt_oss():
    config = GptOssConfig(
        hidden_size=SIZE, intermediate_size=20, num_local_experts=NUM_EXPERTS, num_hidden_layers=1
    )
    theirs, x = randomised(GptOssExperts(config)), 20 * torch.randn(7, SIZE)
    ids, weights = choice(7, 3)
    # Its matrices are [inputs, outputs], gate and up in turn.
    gate_up = theirs.gate_up_proj.mT.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
    gate_up_bias = theirs.gate_up_proj_bias.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1)
    ours = experts.reference(
        x,
        ids.int(),
        weights,
        gate_up,
        theirs.down_proj.mT,
        gate_up_bias,
        theirs.down_proj_bias,
        Gate(alpha=1.702, shift=1.0, limit=7.0),
    )
    torch.testing.assert_close(ours, theirs(x, ids, weights), atol=1e-4, rtol=1e-4)


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_every_pair_is_in_one_block_of_its_slot(data):
    from penstock.kernels.moe.triton_experts import sorted_pairs

    num_slots = data.draw(st.integers(1, 9))
    num_active = data.draw(st.integers(1, num_slots))
    num_tokens = data.draw(st.integers(1, 60))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    odds = torch.rand(num_tokens, num_slots, generator=generator) + 3 * torch.rand(num_slots)
    slots = odds.topk(num_active).indices.int()
    if torch.cuda.is_available():
        slots = slots.cuda()
    pairs, block_slots = (t.cpu() for t in sorted_pairs(slots, num_slots, 16))
    num_pairs, seen = slots.numel(), []
    for block, slot in zip(pairs.tolist(), block_slots.tolist(), strict=True):
        real = [pair for pair in block if pair < num_pairs]
        assert all(slots.flatten()[pair] == slot for pair in real)
        assert bool(real) == (slot < num_slots)
        seen += real
    assert sorted(seen) == list(range(num_pairs))


def test_scores_that_are_no_numbers_choose_experts_that_exist():
    from penstock.kernels.moe.triton_route import route_triton

    device = "cuda" if torch.cuda.is_available() else "cpu"
    logits = torch.full((2, NUM_EXPERTS), torch.nan, device=device)
    slots = torch.arange(NUM_EXPERTS, dtype=torch.int32, device=device)
    load = torch.zeros(NUM_EXPERTS, dtype=torch.int64, device=device)
    ids, _ = route_triton(logits, Routing(num_active=3), None, slots, load)
    assert ids.min() >= 0 and ids.max() < NUM_EXPERTS and load.sum() == 6
