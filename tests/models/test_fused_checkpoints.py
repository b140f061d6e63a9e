"""Checkpoints whose tensors are taken apart or put in another order while they are read, quantized:
fused query, key and value, fused gate and up, heads that rotate neighbors."""

import json

import pytest
import torch
from fp8_models import SHAPE as BLOCKS
from fp8_models import make_fp8_checkpoint, truth
from paged_driver import CPU, load_model, mixed_run, prompts
from safetensors.torch import load_file, save_file
from tiny_models import make_checkpoint, reference_model
from weight_only_models import FILE, make_weight_only_checkpoint

from penstock.models.spec import parse_model_spec
from penstock.parallel.mesh import RankMesh
from penstock.quantization.choose import choose_schemes
from penstock.types.mesh import MeshShape
from penstock.weights.load import named_parts
from penstock.weights.stream import stream

SINGLE = RankMesh.single()
ROUNDED = 0.015  # activations near the middle between two FP8 values fall to either side
ARCHITECTURES = ("phi3", "glm4", "llama4_text")


def load(folder, mesh=SINGLE):
    schemes = choose_schemes(parse_model_spec(folder).quantization, folder, torch.float32, CPU)
    return load_model(folder, mesh=mesh, schemes=schemes)


@torch.inference_mode()
def assert_logits(folder, model, tolerance):
    sequences = prompts(500)
    ours = torch.cat(mixed_run(load(folder), sequences))
    theirs = torch.cat([model(torch.tensor([ids])).logits[0] for ids in sequences])
    assert (ours - theirs).abs().mean() / theirs.abs().mean() < tolerance


@pytest.mark.parametrize(
    ("arch", "layout"),
    [("phi3", "awq"), ("phi3", "nvfp4 modelopt"), ("glm4", "gptq ordered"), ("glm4", "int8")],
)
def test_weight_only_logits_are_those_of_transformers(tmp_path, arch, layout):
    folder = make_weight_only_checkpoint(tmp_path, layout, arch)
    assert_logits(folder, reference_model(folder / "plain"), 1e-4)


@pytest.mark.parametrize(
    ("arch", "dialect"),
    [("phi3", "modelopt"), ("phi3", "fp8 blocks"), ("glm4", "fp8 blocks"),
     ("glm4", "compressed dynamic")],
)  # fmt: skip
def test_fp8_logits_are_those_of_transformers(tmp_path, arch, dialect):
    overrides = {"head_dim": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    folder = make_fp8_checkpoint(tmp_path, dialect, arch, **(BLOCKS | overrides))
    assert_logits(folder, truth(folder, dialect), ROUNDED)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_two_ranks_share_each_matrix(tmp_path, arch):
    folder = make_checkpoint(tmp_path, arch)
    whole = load(folder).layers[0]
    ranks = [load(folder, RankMesh.place(rank, MeshShape(tp=2))).layers[0] for rank in range(2)]
    sizes = (64, 32, 32)  # of query, key and value
    parts = whole.attention.qkv_proj.values().split(sizes)
    halves = [rank.attention.qkv_proj.values().split([n // 2 for n in sizes]) for rank in ranks]
    for part, first, second in zip(parts, *halves, strict=True):
        assert torch.equal(torch.cat((first, second)), part)


@pytest.mark.parametrize("arch", ["gemma2", "gemma3_text", "glm4_moe", *ARCHITECTURES])
def test_what_the_checkpoint_calls_a_parameter_is_found_backwards(tmp_path, arch):
    """For what a checkpoint leaves unquantized, and for messages."""
    folder = make_checkpoint(tmp_path, arch)
    model, found = load_model(folder), {}
    for tensor in stream((folder / FILE,)):
        found |= {name: tensor.name for name, _ in named_parts([tensor], model.weight_rules)}
    for name, stored in found.items():
        source = model.weight_rules.source(model.weight_rules.target(name))
        assert source in (name, stored), (source, name)


@pytest.mark.parametrize(("arch", "made"), [("phi3", "fp8"), ("glm4", "int8")])
def test_online_quantization_reads_them_as_well(tmp_path, arch, made):
    folder = make_checkpoint(tmp_path, arch, **BLOCKS)
    sequences = prompts(500)
    plain = torch.cat(mixed_run(load(folder), sequences))
    schemes = choose_schemes(None, folder, torch.float32, CPU, online=made)
    ours = torch.cat(mixed_run(load_model(folder, schemes=schemes), sequences))
    assert 0 < (ours - plain).norm() / plain.norm() < 0.3  # rows in another order give 1.4


@pytest.mark.parametrize("names", ["published", "transformers 5"])
@pytest.mark.parametrize("arch", ["gemma3_text", "llama4_text"])
def test_the_language_model_of_text_and_images_is_read(tmp_path, arch, names):
    """Its configuration one level down, its tensors behind a prefix, others beside them."""
    folder = make_checkpoint(tmp_path / "text", arch)
    sequences = prompts(500)
    expected = mixed_run(load(folder), sequences)
    prefix = {"published": "language_model.model.", "transformers 5": "model.language_model."}
    head = {"published": "language_model.lm_head.", "transformers 5": "lm_head."}
    tensors = {
        name.replace("model.", prefix[names], 1)
        if name.startswith("model.")
        else name.replace("lm_head.", head[names], 1): tensor
        for name, tensor in load_file(folder / FILE).items()
    }
    tensors |= {
        "vision_tower.patches.weight": torch.ones(3, 3),
        "model.vision_model.patches.weight": torch.ones(3, 3),
        "multi_modal_projector.weight": torch.ones(3),
    }
    save_file(tensors, folder / FILE)
    text = json.loads((folder / "config.json").read_text())
    outer = {
        "architectures": [
            text.pop("architectures")[0].replace("CausalLM", "ConditionalGeneration")
        ],
        "model_type": text["model_type"].removesuffix("_text"),
        "eos_token_id": text.pop("eos_token_id"),
        "text_config": text,
        "vision_config": {"hidden_size": 3},
    }
    (folder / "config.json").write_text(json.dumps(outer))
    spec = parse_model_spec(folder, {"max_position_embeddings": 64})
    assert spec.max_position == 64 and spec.eos_token_ids and spec.model_type in arch
    for ours, theirs in zip(mixed_run(load(folder), sequences), expected, strict=True):
        assert torch.equal(ours, theirs)
