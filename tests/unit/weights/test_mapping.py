"""Checkpoint names become parameter names by whole words."""

from penstock.weights.mapping import DECODER_NAMES, Target, fuse, rename, rules, skip

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
