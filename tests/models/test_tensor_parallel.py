"""Two ranks give the logits of one, each holds half of what can be split. Processes over gloo."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from mxfp4_models import make_packed_checkpoint
from paged_driver import load_model, mixed_run, prompts
from safetensors.torch import load_file
from tiny_models import make_checkpoint
from waiting import free_port

from penstock.models.spec import parse_model_spec

FIXTURES = Path(__file__).parents[1] / "fixtures"
SIZE = 2
CASES = {
    "deepseek_v3": ("deepseek_v3", {}),
    "deepseek_v2, queries without a latent": ("deepseek_v2", {"q_lora_rank": None}),
    "gemma2": ("gemma2", {}),
    "gemma3_text, one kv head for two ranks": ("gemma3_text", {"num_key_value_heads": 1}),
    "glm4": ("glm4", {}),
    "glm4_moe": ("glm4_moe", {}),
    "gpt_oss": ("gpt_oss", {}),
    "gpt_oss, packed experts": ("gpt_oss, packed", {}),
    "gpt_oss, three groups for two ranks": ("gpt_oss, packed", {"intermediate_size": 96}),
    "gpt_oss, one kv head for two ranks": ("gpt_oss", {"num_key_value_heads": 1}),
    "llama, all biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, one kv head for two ranks": ("llama", {"num_key_value_heads": 1}),
    "llama4_text": ("llama4_text", {}),
    "nemotron, all biases": ("nemotron", {"attention_bias": True, "mlp_bias": True}),
    "phi3": ("phi3", {}),
    "qwen2, tied, even vocabulary": ("qwen2", {"tie_word_embeddings": True, "vocab_size": 640}),
    "qwen3": ("qwen3", {}),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen3_moe, one dense layer": ("qwen3_moe", {"mlp_only_layers": [0]}),
    "qwen3_next": ("qwen3_next", {}),
    "qwen3_next, one kv head for two ranks": ("qwen3_next", {"num_key_value_heads": 1}),
    "deepseek_v3, sets of experts": ("deepseek_v3", {}),
    "gpt_oss, sets of packed experts": ("gpt_oss, packed", {}),
    "llama4_text, sets of experts": ("llama4_text", {}),
    "qwen2_moe, sets of experts": ("qwen2_moe", {}),
}
HAS_SETS = [" sets of " in name for name in CASES]  # each rank has other experts
REPLICATED = (
    "norm",
    "o_proj.bias",
    "down_proj.bias",
    "down.bias",
    "router",
    "shared_gate",
    "conv1d",
    "in_proj_ba",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Path, list[Path]]:
    """The output folder of both ranks, and the checkpoint of each case."""
    root = tmp_path_factory.mktemp("tp")
    folders = [
        make_packed_checkpoint(root / str(number), **overrides)
        if arch == "gpt_oss, packed"
        else make_checkpoint(root / str(number), arch, **overrides)
        for number, (arch, overrides) in enumerate(CASES.values())
    ]
    address = f"127.0.0.1:{free_port()}"
    cases = [
        f"{folder}:{SIZE if has_sets else 1}"
        for folder, has_sets in zip(folders, HAS_SETS, strict=True)
    ]
    worker = Path(__file__).with_name("tp_worker.py")
    ranks = [
        subprocess.Popen(
            [sys.executable, worker, str(rank), str(SIZE), address, root, *cases],
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(FIXTURES)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(SIZE)
    ]
    try:
        errors = [rank.communicate(timeout=600)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, error in zip(ranks, errors, strict=True):
        assert rank.returncode == 0, error
    return root, folders


@pytest.mark.parametrize("number", range(len(CASES)), ids=list(CASES))
def test_every_rank_has_the_logits_of_a_single_one(run, number):
    root, folders = run
    expected = mixed_run(load_model(folders[number], finished=True), prompts(500))
    for rank in range(SIZE):
        found = load_file(root / f"logits-{number}-{rank}.safetensors")
        for name, theirs in zip("abc", expected, strict=True):
            torch.testing.assert_close(found[name], theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("number", range(len(CASES)), ids=list(CASES))
def test_every_rank_holds_exactly_its_half(run, number):
    root, folders = run
    spec = parse_model_spec(folders[number])
    single = {name: p.numel() for name, p in load_model(folders[number]).named_parameters()}
    for rank in range(SIZE):
        sizes = json.loads((root / f"sizes-{number}-{rank}.json").read_text())
        assert sizes.keys() == single.keys()
        for name, size in sizes.items():
            if HAS_SETS[number] and ".experts." in name:
                assert size * SIZE == single[name], name
            elif any(part in name for part in REPLICATED):
                assert size == single[name], name
            elif ".experts." in name and list(CASES)[number].endswith("three groups for two ranks"):
                assert size * 3 == single[name] * (1 + rank), name
            elif name in ("embed.weight", "head.weight"):
                num_rows = -(-spec.vocab_size // (64 * SIZE)) * 64  # padded to whole tiles per rank
                assert size == num_rows * spec.hidden_size
            elif "qkv_a_proj" in name:
                latent = spec.latent
                cached_size = latent.kv_rank + latent.rope_size
                head_size = latent.nope_size + latent.rope_size
                width = latent.q_rank or spec.num_heads * head_size // SIZE
                assert size == (width + cached_size) * spec.hidden_size  # latents are on both
            elif "qkv_proj" in name and spec.num_kv_heads < SIZE:
                width = spec.hidden_size if name.endswith("weight") else 1
                num_queries = spec.num_heads * (1 if spec.delta is None else 2)  # and their gates
                heads = num_queries // SIZE + 2  # the KV head is on both ranks
                assert size == heads * spec.head_size * width
            else:
                assert size * SIZE == single[name], name
        assert sum(sizes.values()) < 0.62 * sum(single.values())
