"""Choosing experts and applying them: the references against transformers, sorting by its rules."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_cases import EXPERT_FORMATS, experts_case, weight_only_experts_case
from transformers import DeepseekV2Config, DeepseekV3Config, GptOssConfig, Qwen3MoeConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, GptOssTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts, Qwen3MoeTopKRouter

from penstock.errors import ConfigError
from penstock.kernels.moe import (
    SILU,
    Gate,
    Routing,
    experts,
    mxfp4_values,
    pack_mxfp4,
    plain_weights,
    route,
    router_logits,
)
from penstock.kernels.moe.wna16 import weight_only_experts

pytest.importorskip("triton")
SIZE, NUM_EXPERTS = 24, 16


def randomized(module: torch.nn.Module) -> torch.nn.Module:
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


@pytest.mark.parametrize(
    "router",
    [
        Qwen3MoeTopKRouter(Qwen3MoeConfig(hidden_size=SIZE, num_experts=NUM_EXPERTS)),
        GptOssTopKRouter(GptOssConfig(hidden_size=SIZE, num_local_experts=NUM_EXPERTS)),
    ],
    ids=["qwen", "gpt_oss"],
)
def test_scores_are_those_of_transformers_in_fp32(router):
    """Also of 16-bit numbers, whose products lose nothing."""
    from penstock.kernels.moe.routing import router_logits_gemm, router_logits_gemv

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    router, x = randomized(router).bfloat16(), torch.randn(4, SIZE).bfloat16()
    weight, bias = router.weight, getattr(router, "bias", None)
    expected = router.float()(x.float())[0]
    for run in (router_logits.reference, router_logits_gemv, router_logits_gemm):
        found = run(x.to(device), weight.to(device), None if bias is None else bias.to(device))
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.cpu(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("renormalize", [False, True])
def test_softmax_choice_is_that_of_qwen(renormalize):
    config = Qwen3MoeConfig(
        hidden_size=SIZE, num_experts=NUM_EXPERTS, num_experts_per_tok=5, norm_topk_prob=renormalize
    )
    router, x = randomized(Qwen3MoeTopKRouter(config)), torch.randn(9, SIZE)
    logits, weights, ids = router(x)
    *ours, load = routed(logits, Routing(num_active=5, renormalize=renormalize))
    assert_same_choice(ours, (ids, weights))
    assert torch.equal(load, torch.bincount(ids.flatten(), minlength=NUM_EXPERTS))


def test_softmax_of_the_chosen_is_that_of_gpt_oss():
    config = GptOssConfig(
        hidden_size=SIZE, num_local_experts=NUM_EXPERTS, num_experts_per_tok=4, num_hidden_layers=1
    )
    logits, weights, ids = randomized(GptOssTopKRouter(config))(torch.randn(9, SIZE))
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
    router, x = randomized(DeepseekV3TopkRouter(config)), torch.randn(40, SIZE)
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


@pytest.mark.parametrize(("num_groups", "num_active_groups"), [(4, 2), (8, 3), (16, 5)])
def test_choice_within_the_groups_of_the_best_expert_is_that_of_deepseek_v2(
    num_groups, num_active_groups
):
    config = DeepseekV2Config(
        hidden_size=SIZE,
        n_routed_experts=NUM_EXPERTS,
        num_experts_per_tok=4,
        num_attention_heads=4,
        topk_method="group_limited_greedy",
        n_group=num_groups,
        topk_group=num_active_groups,
        routed_scaling_factor=1.6,
    )
    logits, weights, ids = randomized(DeepseekV2TopkRouter(config))(torch.randn(40, SIZE))
    routing = Routing(
        num_active=4,
        scale=1.6,
        num_groups=num_groups,
        num_active_groups=num_active_groups,
        num_best=1,
    )
    *ours, _ = routed(logits, routing)
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
    theirs, x = randomized(Qwen3MoeExperts(config)), torch.randn(7, SIZE)
    ids, weights = choice(7, 3)
    ours = experts.reference(
        x,
        ids.int(),
        weights,
        plain_weights(theirs.gate_up_proj),
        plain_weights(theirs.down_proj),
        None,
        None,
        SILU,
    )
    torch.testing.assert_close(ours, theirs(x, ids, weights))


def test_clamped_experts_with_biases_are_those_of_gpt_oss():
    config = GptOssConfig(
        hidden_size=SIZE, intermediate_size=20, num_local_experts=NUM_EXPERTS, num_hidden_layers=1
    )
    theirs, x = randomized(GptOssExperts(config)), 20 * torch.randn(7, SIZE)
    ids, weights = choice(7, 3)
    # Its matrices are [inputs, outputs], gate and up in turn.
    gate_up = theirs.gate_up_proj.mT.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
    gate_up_bias = theirs.gate_up_proj_bias.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1)
    ours = experts.reference(
        x,
        ids.int(),
        weights,
        plain_weights(gate_up),
        plain_weights(theirs.down_proj.mT),
        gate_up_bias,
        theirs.down_proj_bias,
        Gate(alpha=1.702, shift=1.0, limit=7.0),
    )
    torch.testing.assert_close(ours, theirs(x, ids, weights), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("num_groups", [1, 4, 5, 90])
def test_mxfp4_is_unpacked_as_transformers_does(num_groups):
    """Every byte, every scale; also those that lie in bfloat16's smallest and largest numbers."""
    blocks = torch.arange(256, dtype=torch.uint8).repeat(3 * 16 * num_groups)
    blocks = blocks[torch.randperm(len(blocks))].view(3, 256, num_groups, 16)
    scales = torch.arange(255, dtype=torch.uint8).repeat(4 * num_groups + 1)
    scales = scales[torch.randperm(len(scales))][: 3 * 256 * num_groups].view(3, 256, num_groups)
    expected = convert_moe_packed_tensors(blocks, scales).mT
    found = mxfp4_values(blocks.flatten(2), scales).bfloat16()
    assert torch.equal(found, expected)
    with pytest.raises(ConfigError, match=r"scale of 254, 2\^127"):
        pack_mxfp4(blocks.flatten(2), scales)
    scales = scales.clamp(max=160)
    expected = convert_moe_packed_tensors(blocks, scales).mT
    packed = pack_mxfp4(blocks.flatten(2), scales)
    assert (packed.out_features, packed.in_features) == (256, 32 * num_groups)
    for slot in range(3):
        assert torch.equal(packed.matrix(slot).bfloat16(), expected[slot])


@pytest.mark.parametrize("format", EXPERT_FORMATS)
@pytest.mark.parametrize(("num_tokens", "rows"), [(20, 16), (37, 32), (70, 64)])
def test_all_tokens_may_choose_one_expert(format, num_tokens, rows):
    from penstock.kernels.moe.grouped_gemm import experts_grouped
    from penstock.kernels.moe.mxfp4_triton import experts_mxfp4

    run = experts_mxfp4 if format == "mxfp4" else experts_grouped
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    case = experts_case(num_tokens, 7, 2, 256, 128, format=format, bias=True)
    x, slots, *rest = case.make(torch.float32, device)
    slots[:, 0], slots[:, 1] = 5, 2
    expected = experts.reference(x, slots, *rest)
    errors = (run(x, slots, *rest, rows=rows) - expected).abs()
    close = 0.03 if format.startswith("fp8") else 1e-5
    assert errors.mean() < close * expected.abs().mean()


def test_large_scales_of_mxfp4_reach_the_result():
    from penstock.kernels.moe.mxfp4_triton import experts_mxfp4

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    blocks = torch.randint(256, (1, 64, 16), dtype=torch.uint8, device=device)
    down_blocks = torch.randint(256, (1, 32, 16), dtype=torch.uint8, device=device)
    for scale in (75, 90, 127, 150):
        gate_up = pack_mxfp4(blocks, torch.full((1, 64, 1), scale, dtype=torch.uint8).to(device))
        down = pack_mxfp4(down_blocks, torch.full((1, 32, 1), 127, dtype=torch.uint8).to(device))
        x = (2.0 ** (127 - scale) * torch.randn(2, 32)).to(device)
        slots = torch.zeros(2, 1, dtype=torch.int32, device=device)
        weights = torch.ones(2, 1, device=device)
        arguments = x, slots, weights, gate_up, down, None, None, SILU
        expected = experts.reference(*arguments)
        assert expected.abs().mean() > 1
        torch.testing.assert_close(experts_mxfp4(*arguments), expected, atol=1e-3, rtol=1e-4)


@pytest.fixture
def unwritten_numbers_are_nan():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("num_tokens", [1, 3, 9])
@pytest.mark.parametrize("format", ["plain", "fp8 rows", "fp8 blocks", "mxfp4"])
def test_experts_that_lie_elsewhere_add_nothing(format, num_tokens, unwritten_numbers_are_nan):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    case = experts_case(num_tokens, 5, 3, 128, 128, format=format, bias=True)
    x, slots, weights, *matrices, gate_up_bias, down_bias, gate = case.make(torch.float32, device)
    rest = (*(replace(one, has_all=False) for one in matrices), gate_up_bias, down_bias, gate)
    is_elsewhere = torch.rand(slots.shape) < 0.5
    is_elsewhere[0] = True
    expected = experts.reference(x, slots, weights.masked_fill(is_elsewhere, 0.0), *rest)
    assert expected[0].abs().max() == 0
    slots[is_elsewhere] = 5
    for name, impl in experts.implementations().items():
        if impl.fits is None or impl.fits(x, slots, weights, *rest):
            found = impl.run(x, slots, weights, *rest)
            atol = 0.05 if format.startswith("fp8") else 1e-4
            torch.testing.assert_close(found, expected, atol=atol, rtol=0.02, msg=name)


@pytest.mark.parametrize("num_tokens", [2, 9])
def test_weight_only_experts_that_lie_elsewhere_add_nothing(num_tokens, unwritten_numbers_are_nan):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    case = weight_only_experts_case("int4", num_tokens, 4, 3, 128, 64, group=32, bias=True)
    x, slots, weights, *rest = case.make(torch.float32, device)
    is_elsewhere = torch.rand(slots.shape) < 0.5
    expected = weight_only_experts.reference(
        x, slots, weights.masked_fill(is_elsewhere, 0.0), *rest
    )
    slots[is_elsewhere] = 4
    for impl in weight_only_experts.implementations().values():
        found = impl.run(x, slots, weights, *rest)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-3)


def check_sorted(num_tokens: int, num_slots: int, num_active: int, seed: int) -> None:
    from penstock.kernels.moe.align import sorted_pairs

    generator = torch.Generator().manual_seed(seed)
    # One more than there are: pairs of it are left out.
    odds = torch.rand(num_tokens, num_slots + 1, generator=generator) + 3 * torch.rand(
        num_slots + 1
    )
    slots = odds.topk(num_active).indices.int()
    if torch.cuda.is_available():
        slots = slots.cuda()
    pairs, block_slots = (t.cpu() for t in sorted_pairs(slots, num_slots, 16))
    slots_P, seen = slots.flatten().cpu(), []
    for block, slot in zip(pairs, block_slots.tolist(), strict=True):
        real = block[block < len(slots_P)]
        assert (slots_P[real] == slot).all()
        assert bool(len(real)) == (slot < num_slots)
        seen += real.tolist()
    assert sorted(seen) == (slots_P < num_slots).nonzero().flatten().tolist()


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_pairs_are_sorted_into_blocks_of_one_slot_each(data):
    num_slots = data.draw(st.integers(1, 9))
    num_active = data.draw(st.integers(1, num_slots))
    check_sorted(data.draw(st.integers(1, 60)), num_slots, num_active, data.draw(st.integers(0, 9)))


@pytest.mark.parametrize("shape", [(171, 7, 7), (90, 70, 16)])
def test_many_pairs_are_sorted_by_many_programs(shape):
    check_sorted(*shape, seed=0)


def test_scores_that_are_no_numbers_choose_experts_that_exist():
    from penstock.kernels.moe.routing import route_triton

    device = "cuda" if torch.cuda.is_available() else "cpu"
    logits = torch.full((2, NUM_EXPERTS), torch.nan, device=device)
    slots = torch.arange(NUM_EXPERTS, dtype=torch.int32, device=device)
    load = torch.zeros(NUM_EXPERTS, dtype=torch.int64, device=device)
    ids, _ = route_triton(logits, Routing(num_active=3), None, slots, load)
    assert ids.min() >= 0 and ids.max() < NUM_EXPERTS and load.sum() == 6
