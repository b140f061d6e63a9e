"""DeepSeek's own: configurations of the real models, 8-bit weights and cache, what ranks hold."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fp8_models import RoundingCache, make_fp8_checkpoint, truth
from paged_driver import CPU, PagedDriver, load_model, mixed_run, prompts
from safetensors.torch import load_file, save_file
from tiny_models import make_checkpoint, reference_model
from transformers import AutoConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import yarn_apply_mscale

from penstock.errors import ConfigError
from penstock.kernels.attention.backend import get_backend
from penstock.layers.rope import score_factor
from penstock.models.deepseek_v3 import weight_rules
from penstock.models.registry import build_model
from penstock.models.spec import parse_model_spec
from penstock.parallel.mesh import RankMesh
from penstock.types.cache_spec import LatentKV
from penstock.types.model_spec import ModelSpec, W8A8Spec
from penstock.weights.load import dummy_weights, load_weights
from penstock.weights.mapping import Target

REAL = Path(__file__).parents[3] / "shared" / "configs"
FILE = "model.safetensors"
YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
V2_LITE = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "bos_token_id": 100000,
    "eos_token_id": 100001,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 102400,
}
V3_1 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-6,
    "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}


def parse(folder: Path, fields: dict) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(fields))
    return parse_model_spec(folder)


def folders(tmp_path: Path) -> list[Path]:
    made = [tmp_path / "lite", tmp_path / "v3.1"]
    for folder, fields in zip(made, (V2_LITE, V3_1), strict=True):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(fields))
    return [*made, *REAL.glob("DeepSeek*")]


def test_real_configurations_are_read_as_transformers_does(tmp_path):
    for folder in folders(tmp_path):
        spec, theirs = parse_model_spec(folder), AutoConfig.from_pretrained(folder)
        latent, moe = spec.latent, spec.moe
        assert spec.architecture == theirs.architectures[0]
        assert latent.kv_rank == theirs.kv_lora_rank and latent.q_rank == theirs.q_lora_rank
        assert latent.nope_size == theirs.qk_nope_head_dim
        assert latent.rope_size == spec.head_size == theirs.qk_rope_head_dim
        assert latent.value_size == theirs.v_head_dim and latent.is_interleaved
        assert spec.max_position == theirs.max_position_embeddings
        assert spec.eos_token_ids == (theirs.eos_token_id,)
        scale = (latent.nope_size + latent.rope_size) ** -0.5
        expected = yarn_apply_mscale(theirs.rope_parameters, scale)
        assert scale * score_factor(spec.rope) == pytest.approx(expected) != scale
        num_dense = theirs.first_k_dense_replace
        assert moe.layers == tuple(n >= num_dense for n in range(theirs.num_hidden_layers))
        assert moe.num_experts == theirs.n_routed_experts
        assert moe.num_active == theirs.num_experts_per_tok
        assert moe.intermediate_size == theirs.moe_intermediate_size
        assert (
            moe.shared_intermediate_size == theirs.moe_intermediate_size * theirs.n_shared_experts
        )
        assert moe.renormalize == theirs.norm_topk_prob
        assert moe.scale == theirs.routed_scaling_factor
        assert (moe.num_groups, moe.num_active_groups) == (theirs.n_group, theirs.topk_group)


def test_v3_1_has_weights_in_blocks_and_one_draft_layer(tmp_path):
    spec = parse(tmp_path, V3_1)
    fp8 = W8A8Spec(weights="block", inputs="group", scale_name="weight_scale_inv")
    assert spec.quantization.format == fp8
    assert (spec.num_layers, spec.num_nextn_predict_layers) == (61, 1)
    rules = weight_rules(spec)
    assert rules.target("model.layers.61.self_attn.o_proj.weight") is None
    assert rules.target("model.layers.6.mlp.experts.7.up_proj.weight_scale_inv") == Target(
        "layers.6.mlp.experts.gate_up.weight_scale_inv", 15
    )
    name = "model.layers.60.self_attn.kv_a_proj_with_mqa.weight_scale_inv"
    fused = Target("layers.60.attention.qkv_a_proj.weight_scale_inv", 1)
    assert rules.target(name) == fused and rules.source(fused) == name


@pytest.mark.parametrize(
    ("base", "fields", "message"),
    [
        (
            V2_LITE,
            {"topk_method": "noaux_tc"},
            "topk_method: 'noaux_tc' is not supported; there are greedy, group",
        ),
        (
            V2_LITE,
            {"topk_method": "group_limited_greedy", "n_group": None},
            "n_group: is missing",
        ),
        (
            V2_LITE,
            {"scoring_func": "sigmoid"},
            "scoring_func: 'sigmoid' is not supported; there are softmax",
        ),
        (V2_LITE, {"attention_bias": True}, "attention_bias: is not supported for queries"),
        (V3_1, {"moe_layer_freq": 2}, "moe_layer_freq: is 2, only 1"),
        (V3_1, {"first_k_dense_replace": -1}, "is -1, it must be an integer from 0 on"),
        (V3_1, {"kv_lora_rank": 0}, "kv_lora_rank: is 0, it must be a positive integer"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path, base, fields, message):
    with pytest.raises(ConfigError, match=message):
        parse(tmp_path, base | fields)


def test_the_cache_is_one_latent_per_token_whatever_the_number_of_heads(tmp_path):
    spec = replace(parse(tmp_path, V2_LITE), num_layers=1)
    spec = replace(spec, moe=replace(spec.moe, layers=(False,)), intermediate_size=64)
    backend = get_backend("reference")
    model = build_model(spec, RankMesh.single(), torch.bfloat16, CPU, backend)
    (layer,) = model.cache_layers()
    assert layer.cache_spec() == LatentKV(latent_size=512, rope_size=64, dtype="bfloat16")
    assert layer.cache_spec().bytes_per_token() == 1152


SHAPE = {  # whole blocks of 128, no experts
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 128,
    "q_lora_rank": 128,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 128,
    "head_dim": 128,
    "v_head_dim": 64,
    "num_attention_heads": 4,
}
CLOSE = 0.015  # as in test_fp8_models


def load(folder: Path, cache_dtype: torch.dtype | None = None, backend: str = "sdpa"):
    spec, mesh = parse_model_spec(folder), RankMesh.single()
    model = build_model(
        spec, mesh, torch.float32, CPU, get_backend(backend), cache_dtype=cache_dtype
    )
    load_weights(model, folder, spec, mesh, progress=False)
    with torch.inference_mode():
        model.finish()
    return model


@torch.inference_mode()
def error_against(model, ours: list[torch.Tensor], make_cache=lambda: None) -> float:
    """Mean error of our logits over the mean size of theirs."""
    theirs = [
        model(torch.tensor([ids]), past_key_values=make_cache()).logits[0] for ids in prompts(500)
    ]
    difference = torch.cat([a - b for a, b in zip(ours, theirs, strict=True)])
    return float(difference.abs().mean() / torch.cat(theirs).abs().mean())


@pytest.mark.parametrize("dialect", ["fp8 blocks", "fp8 static", "compressed dynamic"])
def test_8_bit_weights_are_multiplied_as_such_but_those_of_keys_and_values(tmp_path, dialect):
    folder = make_fp8_checkpoint(tmp_path, dialect, "deepseek_v3", **SHAPE)
    model, plain = load(folder), load_file(folder / "plain" / FILE)
    for number in range(3):
        attention, name = model.layers[number].attention, f"model.layers.{number}.self_attn"
        weight_OC = attention.weight_HEC.flatten(0, 1)
        assert torch.equal(weight_OC, plain[f"{name}.kv_b_proj.weight"])
        assert attention.qkv_a_proj.weight.dtype == torch.float8_e4m3fn
    ours = mixed_run(model, prompts(500))
    assert error_against(truth(folder, dialect), ours) < CLOSE
    assert error_against(reference_model(folder / "plain"), ours) > 3 * CLOSE


def test_a_cache_of_8_bit_floats_rounds_latents(tmp_path):
    folder = make_checkpoint(tmp_path, "deepseek_v3", first_k_dense_replace=3)
    model = load(folder, torch.float8_e4m3fn)
    assert model.layers[0].attention.cache_spec().bytes_per_token() == 32 + 16
    ours = mixed_run(model, prompts(500))
    theirs = reference_model(folder)
    assert error_against(theirs, ours, lambda: RoundingCache(1.0, 1.0)) < CLOSE
    assert error_against(theirs, ours) > 3 * CLOSE


def test_a_prompt_reads_rounded_latents_alike_at_once_and_in_chunks(tmp_path):
    folder = make_checkpoint(tmp_path, "deepseek_v3", first_k_dense_replace=3)
    model = load(folder, torch.float8_e4m3fn)
    (ids,) = prompts(500, [40])
    (whole,) = PagedDriver(model).step([(0, ids)])
    driver = PagedDriver(model)
    parts = [driver.step([(0, ids[start : start + 7])])[0] for start in range(0, 40, 7)]
    # The mean: the last bit of a sum may round a latent to its other neighbour.
    assert (torch.cat(parts) - whole).abs().mean() < 1e-3 * whole.abs().mean()


def test_layers_that_predict_further_tokens_stay_in_the_file(tmp_path):
    folder = make_checkpoint(tmp_path, "deepseek_v3")
    before = mixed_run(load(folder), prompts(500))
    tensors = load_file(folder / FILE)
    draft = {
        name.replace("layers.2.", "layers.3."): 2 * tensor
        for name, tensor in tensors.items()
        if ".layers.2." in name
    }
    save_file(tensors | draft | {"model.layers.3.eh_proj.weight": torch.ones(3)}, folder / FILE)
    with pytest.raises(ConfigError, match=r"unexpected: model\.layers\.3\.eh_proj\.weight"):
        load(folder)
    fields = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(fields))
    for ours, expected in zip(mixed_run(load(folder), prompts(500)), before, strict=True):
        assert torch.equal(ours, expected)


def test_the_backend_of_cpus_gives_what_the_reference_gives(tmp_path):
    folder = make_checkpoint(tmp_path, "deepseek_v3")
    found = [
        mixed_run(load(folder, backend=backend), prompts(500)) for backend in ("reference", "sdpa")
    ]
    for theirs, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_random_weights_run(tmp_path):
    spec = parse_model_spec(make_checkpoint(tmp_path, "deepseek_v3"))
    model = build_model(spec, RankMesh.single(), torch.float32, CPU, get_backend("reference"))
    dummy_weights(model, seed=3)
    model.finish()
    logits = torch.cat(mixed_run(model, prompts(500)))
    assert torch.isfinite(logits).all() and logits.std() > 0.1


def test_low_precision_model_stays_near_the_fp32_one(tmp_path):
    folder = make_checkpoint(tmp_path, "deepseek_v2", q_lora_rank=None, first_k_dense_replace=3)
    low = mixed_run(load_model(folder, dtype=torch.bfloat16, finished=True), prompts(500))
    for ours, theirs in zip(low, mixed_run(load(folder), prompts(500)), strict=True):
        assert ours.dtype == torch.bfloat16
        assert 0 < (ours.float() - theirs).norm() / theirs.norm() < 0.05
