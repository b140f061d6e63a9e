"""Our logits are those of transformers: fp32, tiny models, prefill, chunks and decode mixed."""

import json
from pathlib import Path

import pytest
import torch
from paged_driver import CPU, PagedDriver, load_model, mixed_run, prompts
from tiny_models import make_checkpoint, reference_model

from penstock.hub.folder import local_folder
from penstock.kernels.attention.backend import get_backend
from penstock.models.registry import build_model
from penstock.models.spec import parse_model_spec
from penstock.parallel.mesh import RankMesh
from penstock.weights.load import load_weights

TOLERANCE = 1e-4

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
LONGROPE = {  # three quarters of a head of 16
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.2, 1.4, 1.6, 2.0],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0],
    "original_max_position_embeddings": 64,
}
WINDOWED = {"use_sliding_window": True, "sliding_window": 5}

DEEPSEEK_YARN = YARN | {"mscale": 0.7, "mscale_all_dim": 0.9}

CASES = {
    "deepseek_v2": ("deepseek_v2", {}),
    "deepseek_v2 as V2-Lite": (
        "deepseek_v2",
        {"q_lora_rank": None, "rope_parameters": DEEPSEEK_YARN},
    ),
    "deepseek_v2 as V2, experts of the best groups": (
        "deepseek_v2",
        {"topk_method": "group_limited_greedy", "routed_scaling_factor": 1.6},
    ),
    "deepseek_v3": ("deepseek_v3", {}),
    "deepseek_v3 bias, scaled experts": (
        "deepseek_v3",
        {"attention_bias": True, "routed_scaling_factor": 1.3, "norm_topk_prob": False},
    ),
    "deepseek_v3 rope yarn": ("deepseek_v3", {"rope_parameters": DEEPSEEK_YARN}),
    "deepseek_v3 rope in halves, tied": (
        "deepseek_v3",
        {"rope_interleave": False, "tie_word_embeddings": True},
    ),
    "deepseek_v3 dense, no latent of queries, wide": (
        "deepseek_v3",
        {"first_k_dense_replace": 3, "q_lora_rank": None, "kv_lora_rank": 80, "v_head_dim": 40},
    ),
    "gemma2": ("gemma2", {}),
    "gemma2 tight caps, no window in the first layer, untied": (
        "gemma2",
        {
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 4.0,
            "layer_types": ["full_attention", "sliding_attention"],
            "tie_word_embeddings": False,
        },
    ),
    "gemma2 no caps": (
        "gemma2",
        {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma3_text": ("gemma3_text", {}),
    "gemma3_text as the release, six layers": (
        "gemma3_text",
        {
            "layer_types": None,
            "num_hidden_layers": 6,
            "num_key_value_heads": 1,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "gemma3_text bias, capped logits": (
        "gemma3_text",
        {"attention_bias": True, "final_logit_softcapping": 5.0, "head_dim": 32},
    ),
    "glm, wholly rotated, tied": (
        "glm",
        {"tie_word_embeddings": True, "rope_parameters": {"partial_rotary_factor": 1.0}},
    ),
    "glm4": ("glm4", {}),
    "glm4 no bias, wide heads": ("glm4", {"attention_bias": False, "head_dim": 32}),
    "glm4_moe": ("glm4_moe", {}),
    "glm4_moe groups, bias, no norms, two shared": (
        "glm4_moe",
        {
            "n_group": 3,
            "topk_group": 2,
            "attention_bias": True,
            "use_qk_norm": False,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
        },
    ),
    "gpt_oss": ("gpt_oss", {}),
    "gpt_oss as the release": (
        "gpt_oss",
        {
            "head_dim": 64,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "num_hidden_layers": 4,
        },
    ),
    "gpt_oss other windows, no bias, one expert": (
        "gpt_oss",
        {
            "layer_types": ["full_attention", "sliding_attention"],
            "sliding_window": 5,
            "attention_bias": False,
            "num_experts_per_tok": 1,
        },
    ),
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama all biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama wide heads": ("llama", {"head_dim": 32}),
    "llama one kv head": ("llama", {"num_key_value_heads": 1}),
    "llama as many kv heads": ("llama", {"num_key_value_heads": 4}),
    "llama eps and theta": (
        "llama",
        {"rms_norm_eps": 0.1, "rope_parameters": {"rope_theta": 500.0}},
    ),
    "llama rope llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama rope linear": ("llama", {"rope_parameters": LINEAR}),
    "llama rope dynamic": ("llama", {"rope_parameters": DYNAMIC}),
    "llama rope yarn": ("llama", {"rope_parameters": YARN}),
    "llama4_text": ("llama4_text", {}),
    "llama4_text as Maverick, every second layer with experts, llama3 rope": (
        "llama4_text",
        {
            "moe_layers": None,
            "interleave_moe_layer_step": 2,
            "no_rope_layers": None,
            "no_rope_layer_interval": 2,
            "num_hidden_layers": 4,
            "use_qk_norm": False,
            "rope_parameters": LLAMA3,
        },
    ),
    "llama4_text bias, no growth, tied": (
        "llama4_text",
        {
            "attention_bias": True,
            "attn_temperature_tuning": False,
            "attention_chunk_size": 5,
            "tie_word_embeddings": True,
        },
    ),
    "mistral": ("mistral", {}),
    "mistral window": ("mistral", {"sliding_window": 5}),
    "mixtral": ("mixtral", {}),
    "mixtral tied, window": ("mixtral", {"tie_word_embeddings": True, "sliding_window": 5}),
    "nemotron": ("nemotron", {}),
    "nemotron all biases, tied, wholly rotated": (
        "nemotron",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "norm_eps": 0.1,
            "rope_parameters": {"partial_rotary_factor": 1.0},
        },
    ),
    "phi3": ("phi3", {}),
    "phi3 as Phi-4-mini": (
        "phi3",
        {"tie_word_embeddings": True, "rope_parameters": {"partial_rotary_factor": 0.75}},
    ),
    "phi3 window": ("phi3", {"sliding_window": 5, "num_key_value_heads": 4}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 window above layer 1": ("qwen2", WINDOWED | {"max_window_layers": 1}),
    "qwen2 rope yarn": ("qwen2", {"rope_parameters": YARN | {"attention_factor": 1.3}}),
    "qwen3": ("qwen3", {}),
    "qwen3 tied, bias, wide heads": (
        "qwen3",
        {"tie_word_embeddings": True, "attention_bias": True, "head_dim": 24},
    ),
    "qwen3 layer types": (
        "qwen3",
        WINDOWED | {"layer_types": ["sliding_attention", "full_attention"]},
    ),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen2_moe tied, no bias, weights sum to one": (
        "qwen2_moe",
        {"tie_word_embeddings": True, "qkv_bias": False, "norm_topk_prob": True},
    ),
    "qwen2_moe windows": ("qwen2_moe", WINDOWED | {"max_window_layers": 1}),
    "qwen2_moe every second layer": ("qwen2_moe", {"decoder_sparse_step": 2}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe many experts, bias": (
        "qwen3_moe",
        {
            "num_experts": 20,
            "num_experts_per_tok": 5,
            "norm_topk_prob": True,
            "attention_bias": True,
            "head_dim": 24,
        },
    ),
    "qwen3_moe first layer dense": ("qwen3_moe", {"mlp_only_layers": [0]}),
    "qwen3_moe window": ("qwen3_moe", WINDOWED),
    "qwen3_next": ("qwen3_next", {}),
    "qwen3_next as the release": (
        "qwen3_next",
        {
            "layer_types": None,
            "mlp_only_layers": [],
            "head_dim": 64,
            "num_experts": 40,
            "num_experts_per_tok": 10,
            "linear_value_head_dim": 16,
        },
    ),
    "qwen3_next tied, bias, a head of keys per head of values, half rotated, weights as they are": (
        "qwen3_next",
        {
            "tie_word_embeddings": True,
            "attention_bias": True,
            "linear_num_key_heads": 4,
            "decoder_sparse_step": 2,
            "norm_topk_prob": False,
            "linear_conv_kernel_dim": 3,
            "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    ),
    "qwen3 rope yarn": ("qwen3", {"rope_parameters": YARN | {"beta_fast": 8.0, "truncate": False}}),
}


@torch.inference_mode()
def expected_logits(folder: Path, sequences: list[list[int]]) -> list[torch.Tensor]:
    model = reference_model(folder)
    return [model(torch.tensor([ids])).logits[0] for ids in sequences]


@pytest.mark.parametrize("config_style", [4, 5])
@pytest.mark.parametrize("case", CASES)
def test_mixed_batches_give_the_logits_of_transformers(tmp_path, case, config_style):
    arch, overrides = CASES[case]
    folder = make_checkpoint(tmp_path, arch, config_style=config_style, **overrides)
    model = load_model(folder, finished=True)
    sequences = prompts(parse_model_spec(folder).vocab_size)
    expected = expected_logits(folder, sequences)
    assert min(logits.std() for logits in expected) > 0.5  # else the tolerance would hide mistakes
    for ours, theirs in zip(mixed_run(model, sequences), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)


def test_sharded_files_load_like_one(tmp_path):
    whole = load_model(make_checkpoint(tmp_path / "one", "qwen2"))
    folder = make_checkpoint(tmp_path / "many", "qwen2", max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    for (name, ours), (_, theirs) in zip(
        load_model(folder).named_parameters(), whole.named_parameters(), strict=True
    ):
        assert torch.equal(ours, theirs), name


def test_dynamic_rope_beyond_the_trained_length_is_that_of_a_prompt_of_full_length(tmp_path):
    folder = make_checkpoint(tmp_path, "llama", max_position_embeddings=16, rope_parameters=DYNAMIC)
    assert parse_model_spec(folder).max_position == 16
    (ids,) = prompts(500, [40])
    spec = parse_model_spec(folder, {"max_position_embeddings": len(ids)})
    model = build_model(spec, RankMesh.single(), torch.float32, CPU, get_backend("reference"))
    load_weights(model, folder, spec, RankMesh.single(), progress=False)
    (ours,) = PagedDriver(model).step([(0, ids)])
    torch.testing.assert_close(ours, expected_logits(folder, [ids])[0], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("num_tokens", "num_positions"), [(40, 64 + 2), (70, 80), (70, None)], ids=str
)
def test_longrope_has_the_frequencies_of_the_runs_longest_sequence(
    tmp_path, num_tokens, num_positions
):
    folder = make_checkpoint(tmp_path, "phi3", rope_parameters=LONGROPE)
    (ids,) = prompts(500, [num_tokens])
    spec = parse_model_spec(folder)
    assert spec.max_position == 128
    model = build_model(
        spec,
        RankMesh.single(),
        torch.float32,
        CPU,
        get_backend("reference"),
        num_positions=num_positions,
    )
    load_weights(model, folder, spec, RankMesh.single(), progress=False)
    (ours,) = PagedDriver(model).step([(0, ids)])
    torch.testing.assert_close(ours, expected_logits(folder, [ids])[0], atol=TOLERANCE, rtol=0)


def test_low_precision_model_stays_near_the_fp32_one(tmp_path):
    folder = make_checkpoint(tmp_path, "qwen3")
    sequences = prompts(500)
    for ours, theirs in zip(
        mixed_run(load_model(folder, dtype=torch.bfloat16), sequences),
        expected_logits(folder, sequences),
        strict=True,
    ):
        assert ours.dtype == torch.bfloat16
        distance = (ours.float() - theirs).norm() / theirs.norm()
        assert 0 < distance < 0.05


def test_built_in_tiny_model_gives_the_logits_of_transformers():
    folder = local_folder("tiny")
    sequences = prompts(json.loads((folder / "config.json").read_text())["vocab_size"])
    for ours, theirs in zip(
        mixed_run(load_model(folder), sequences), expected_logits(folder, sequences), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=1e-5)
