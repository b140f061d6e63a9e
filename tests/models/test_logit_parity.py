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
WINDOWED = {"use_sliding_window": True, "sliding_window": 5}

CASES = {
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
    "mistral": ("mistral", {}),
    "mistral window": ("mistral", {"sliding_window": 5}),
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
    model = load_model(folder)
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
