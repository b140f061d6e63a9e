"""Experts in MXFP4: the checkpoint's codes give the logits that transformers computes with them
unpacked, and ranks hold whole groups of inputs."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from paged_driver import CPU, mixed_run, prompts
from safetensors.torch import load_file, save_file
from test_fp8_models import load, ranks
from tiny_models import make_checkpoint, reference_model
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from penstock.errors import ConfigError
from penstock.kernels.attention.backend import get_backend
from penstock.layers.context import ExpertsContext
from penstock.layers.moe import Experts
from penstock.models.registry import build_model
from penstock.models.spec import parse_model_spec
from penstock.parallel.mesh import RankMesh
from penstock.weights.load import dummy_weights, load_weights

CONFIGS = Path(__file__).parents[3] / "shared" / "configs"
NUM_EXPERTS, SIZE, FEATURES = 6, 64, 96
QUANTIZATION = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The packed checkpoint; the unpacked one is in `plain`."""
    folder = tmp_path_factory.mktemp("mxfp4")
    make_checkpoint(folder, "gpt_oss", intermediate_size=FEATURES)
    (folder / "plain").mkdir()
    for name in ("config.json", "generation_config.json"):
        shutil.copy(folder / name, folder / "plain" / name)
    generator = torch.Generator().manual_seed(5)
    packed, plain = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            packed[name] = plain[name] = tensor
            continue
        _, in_features, out_features = tensor.shape
        shape = (NUM_EXPERTS, out_features, in_features // 32)
        blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(120, 125, shape, generator=generator, dtype=torch.uint8)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = convert_moe_packed_tensors(blocks, scales).float()
    save_file(packed, folder / "model.safetensors")
    save_file(plain, folder / "plain" / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = QUANTIZATION
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def experts_of(model) -> list[Experts]:
    return [layer for layer in model.modules() if isinstance(layer, Experts)]


@pytest.mark.parametrize("by_reference", [False, True])
def test_logits_are_those_of_transformers_with_unpacked_experts(folder, by_reference):
    spec, mesh = parse_model_spec(folder), RankMesh.single()
    build = ExpertsContext(by_reference=by_reference)
    model = build_model(spec, mesh, torch.float32, CPU, get_backend("reference"), experts=build)
    load_weights(model, folder, spec, mesh, progress=False)
    model.finish()
    truth = reference_model(folder / "plain")
    texts = prompts(500)
    for text, logits in zip(texts, mixed_run(model, texts), strict=True):
        with torch.inference_mode():
            expected = truth(torch.tensor([text])).logits[0]
        torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)


def test_quantized_weights_stay_so_in_memory(folder):
    for layer in experts_of(load(folder)):
        for part, outputs, tiles in ((layer.gate_up, 2 * FEATURES, 1), (layer.down, SIZE, 1)):
            assert part.weight.values.shape == (NUM_EXPERTS, tiles, outputs, 16)
            assert part.weight.values.dtype == part.weight.scale.dtype == torch.int32


@pytest.mark.parametrize("num_ranks", [2, 3])  # two hold one group and two
def test_ranks_hold_consecutive_features_with_their_scales(folder, num_ranks):
    whole, parts = load(folder), [load(folder, mesh) for mesh in ranks_of_experts(num_ranks)]
    for layer, *shares in zip(*map(experts_of, (whole, *parts)), strict=True):
        for slot in range(NUM_EXPERTS):
            halves = [share.gate_up.weight.matrix(slot).chunk(2) for share in shares]
            found = torch.cat([half[i] for i in range(2) for half in halves])
            assert torch.equal(found, layer.gate_up.weight.matrix(slot))
            found = torch.cat([share.down.weight.matrix(slot) for share in shares], dim=1)
            assert torch.equal(found, layer.down.weight.matrix(slot))


def ranks_of_experts(size: int) -> list[RankMesh]:
    """Ranks that share the experts alone; 3 share no heads equally."""
    found = ranks(size)
    for mesh in found:
        for role in ("attention", "vocab", "mlp"):
            mesh.roles[role] = RankMesh.single().roles[role]
    return found


def test_more_ranks_than_groups_are_refused(folder):
    with pytest.raises(ConfigError, match=r"96, which is 3 times 32 .* use .* at most 3"):
        load(folder, ranks_of_experts(4)[1])


@pytest.mark.skipif(not CONFIGS.is_dir(), reason="real configs are not here")
@pytest.mark.parametrize("name", ["gpt-oss-20b", "gpt-oss-120b"])
def test_published_configs_build(name):
    spec = parse_model_spec(
        CONFIGS / name,
        {"num_hidden_layers": 1, "layer_types": ["full_attention"], "num_local_experts": 8},
    )
    backend = get_backend("reference")
    model = build_model(spec, RankMesh.single(), torch.bfloat16, torch.device("meta"), backend)
    (experts,) = experts_of(model)
    assert experts.gate_up.blocks.shape == (8, 5760, 1440)
    assert experts.down.scales.shape == (8, 2880, 90)


def test_random_weights_behave_like_those_of_a_plain_model(folder):
    def logits(folder: Path) -> torch.Tensor:
        spec = parse_model_spec(folder)
        model = build_model(spec, RankMesh.single(), torch.float32, CPU, get_backend("reference"))
        dummy_weights(model, seed=3)
        model.finish()
        return torch.cat(mixed_run(model, prompts(500)))

    ours, plain = logits(folder), logits(folder / "plain")
    assert torch.isfinite(ours).all()
    assert 0.7 < ours.std() / plain.std() < 1.4
