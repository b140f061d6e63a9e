"""Checkpoint names become parameter names by whole words."""

from penstock.weights.mapping import (
    DECODER_NAMES,
    MOE_NAMES,
    TEXT_NAMES,
    Target,
    fuse,
    rename,
    rules,
    skip,
    stack,
    unfuse,
    unstack,
)

RULES = DECODER_NAMES + rules(
    fuse("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    skip("rotary_emb.inv_freq"),
)


def test_parts_of_a_fused_parameter_are_numbered():
    names = [f"model.layers.3.self_attn.{part}_proj.weight" for part in "qkv"]
    assert [RULES.target(name) for name in names] == [
        Target("layers.3.attention.qkv_proj.weight", part) for part in range(3)
    ]


def test_embedding_head_and_norms_are_renamed():
    assert RULES.target("model.embed_tokens.weight") == Target("embed.weight")
    assert RULES.target("lm_head.weight") == Target("head.weight")
    assert RULES.target("model.norm.weight") == Target("norm.weight")
    name = "model.layers.0.post_attention_layernorm.weight"
    assert RULES.target(name) == Target("layers.0.post_norm.weight")


def test_skipped_names_have_no_target():
    assert RULES.target("model.layers.0.self_attn.rotary_emb.inv_freq") is None


def test_scales_of_the_cache_belong_to_attention_and_may_be_left():
    for name in ("model.layers.0.self_attn.k_proj.k_scale", "model.layers.0.self_attn.k_scale"):
        assert RULES.target(name) == Target("layers.0.attention.k_scale")
        assert RULES.is_spare(name)
    name = "model.layers.0.self_attn.k_proj.weight_scale"
    assert RULES.target(name) == Target("layers.0.attention.qkv_proj.weight_scale", 1)
    assert not RULES.is_spare(name)


def test_words_match_whole_only():
    table = rules(rename("norm", "n"), fuse("ab", ("a", "b")))
    assert table.target("q_norm.aa.weight") == Target("q_norm.aa.weight")
    assert table.target("norm.b") == Target("n.ab", 1)


def test_the_name_of_a_target_in_the_checkpoint_is_found_backwards():
    names = [
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.norm.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.post_attention_layernorm.weight",
        "model.layers.0.self_attn.v_proj.bias",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.mlp.down_proj.weight",
    ]
    assert [RULES.source(RULES.target(name)) for name in names] == names


MOE = DECODER_NAMES + MOE_NAMES + rules(fuse("gate_up_proj", ("gate_proj", "up_proj")))


def test_numbered_tensors_are_stacked_by_number_then_by_part():
    found = [
        MOE.target(f"model.layers.2.mlp.experts.{number}.{part}_proj.weight")
        for number in (0, 11)
        for part in ("gate", "up", "down")
    ]
    assert found == [
        Target("layers.2.mlp.experts.gate_up.weight", 0),
        Target("layers.2.mlp.experts.gate_up.weight", 1),
        Target("layers.2.mlp.experts.down.weight", 0),
        Target("layers.2.mlp.experts.gate_up.weight", 22),
        Target("layers.2.mlp.experts.gate_up.weight", 23),
        Target("layers.2.mlp.experts.down.weight", 11),
    ]


def test_only_numbers_and_whole_words_are_stacked():
    table = rules(stack("experts", "all", ("a", "b")))
    for name in ("experts.x.a", "my_experts.1.a", "experts.1.ab", "experts.a", "experts.1.c.a"):
        assert table.target(name) == Target(name)
    assert table.target("experts.1.b") == Target("experts.all", 3)


def test_names_around_experts_are_found_in_both_directions():
    names = {
        "model.layers.0.mlp.gate.weight": "layers.0.mlp.router.weight",
        "model.layers.0.mlp.gate.e_score_correction_bias": "layers.0.mlp.router.correction_bias",
        "model.layers.0.mlp.shared_expert_gate.weight": "layers.0.mlp.shared_gate",
        "model.layers.0.mlp.shared_expert.up_proj.bias": "layers.0.mlp.shared.gate_up_proj.bias",
        "model.layers.0.mlp.up_proj.weight": "layers.0.mlp.gate_up_proj.weight",
        "model.layers.0.mlp.experts.7.up_proj.weight": "layers.0.mlp.experts.gate_up.weight",
        "model.layers.0.mlp.experts.7.down_proj.weight": "layers.0.mlp.experts.down.weight",
    }
    for name, parameter in names.items():
        target = MOE.target(name)
        assert target.parameter == parameter
        assert MOE.source(target) == name


def test_tensors_of_all_experts_are_taken_apart_by_whole_names_and_found_backwards():
    table = DECODER_NAMES + rules(
        unstack("mlp.experts", "both", ("a.weight", "b.weight")),
        unstack("mlp.experts", "both_bias", ("a.bias", "b.bias")),
        stack("mlp.experts", "ab", ("a", "b")),
    )
    name = "model.layers.4.mlp.experts.both"
    assert table.unstack(name + "_bias").parts == ("a.bias", "b.bias")
    assert table.unstack(name + "_scale") is None and table.unstack(name + ".weight") is None
    member = table.unstack(name).member(name, 11, 1)
    assert member == "model.layers.4.mlp.experts.11.b.weight"
    target = table.target(member)
    assert target == Target("layers.4.mlp.experts.ab.weight", 23)
    assert table.source(target) == name
    assert table.source(Target("layers.4.mlp.experts.ab", 23)) == "model.layers.4.mlp.experts.11.b"


def test_a_fused_tensor_is_called_so_backwards():
    table = rules(unfuse("qkv_proj", ("q_proj", "k_proj", "v_proj"), (4, 2, 2))) + RULES
    rule = table.unfuse("model.layers.0.self_attn.qkv_proj.weight")
    assert rule is not None and table.unfuse("model.layers.0.self_attn.o_proj.weight") is None
    for part, word in enumerate(("q_proj", "k_proj", "v_proj")):
        member = rule.member("model.layers.0.self_attn.qkv_proj.weight", part)
        assert member == f"model.layers.0.self_attn.{word}.weight"
        target = Target("layers.0.attention.qkv_proj.weight", part)
        assert table.target(member) == target
        assert table.source(target) == "model.layers.0.self_attn.qkv_proj.weight"


def test_a_language_model_beside_images_has_two_names_and_one_of_them_backwards():
    table = TEXT_NAMES + RULES
    target = Target("layers.0.attention.o_proj.weight")
    for prefix in ("language_model.model", "model.language_model", "model"):
        assert table.target(f"{prefix}.layers.0.self_attn.o_proj.weight") == target
    assert table.source(target) == "language_model.model.layers.0.self_attn.o_proj.weight"
    for name in ("vision_tower.a.weight", "model.vision_tower.a.weight", "vision_model.a.weight"):
        assert table.target(name) is None
