"""Experts of 8-bit floats: the numbers of the checkpoint bit for bit, logits of transformers that
rounds the same inputs, shares of ranks, and the configs of published checkpoints."""

from pathlib import Path

import pytest
import torch
from fp8_models import DIALECTS, make_fp8_checkpoint, truth
from paged_driver import CPU, mixed_run, prompts
from safetensors.torch import load_file
from test_fp8_models import CLOSE, FILE, error_against, load, ranks
from tiny_models import reference_model

from penstock.errors import ConfigError
from penstock.kernels.attention.backend import get_backend
from penstock.kernels.formats import Fp8Groups, Fp8Rows, Fp8Static
from penstock.layers.context import ExpertsContext
from penstock.layers.moe import Experts
from penstock.models.registry import build_model
from penstock.models.spec import parse_model_spec
from penstock.parallel.mesh import RankMesh
from penstock.weights.load import dummy_weights, load_weights

SHAPE = {"moe_intermediate_size": 256, "num_experts": 5, "num_experts_per_tok": 2}
INPUTS = {"static": Fp8Static, "row": Fp8Rows, "group": Fp8Groups}
CONFIGS = Path(__file__).parents[3] / "shared" / "configs"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("fp8_experts")
    return {name: make_fp8_checkpoint(root / name, name, "qwen3_moe", **SHAPE) for name in DIALECTS}


def matrices(model, layer: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    experts = model.layers[layer].mlp.experts
    return tuple(
        [part.weight.matrix(slot) for slot in range(part.weight.num_slots)]
        for part in (experts.gate_up, experts.down)
    )


@pytest.mark.parametrize("dialect", DIALECTS)
def test_weights_are_those_of_the_checkpoint_bit_for_bit(checkpoints, dialect):
    model, plain = load(checkpoints[dialect]), load_file(checkpoints[dialect] / "plain" / FILE)
    for layer in range(2):
        gate_ups, downs = matrices(model, layer)
        for expert, (gate_up, down) in enumerate(zip(gate_ups, downs, strict=True)):
            name = f"model.layers.{layer}.mlp.experts.{expert}"
            parts = [plain[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down")]
            assert torch.equal(gate_up, torch.cat(parts[:2]))
            assert torch.equal(down, parts[2])
        weight = model.layers[layer].mlp.experts.down.weight
        assert weight.values.dtype == torch.float8_e4m3fn
        assert isinstance(weight.inputs, INPUTS[DIALECTS[dialect][2]])


@pytest.mark.parametrize("dialect", DIALECTS)
def test_logits_are_those_of_transformers_with_rounded_inputs(checkpoints, dialect):
    folder = checkpoints[dialect]
    ours = mixed_run(load(folder), prompts(500))
    assert error_against(truth(folder, dialect), ours) < CLOSE
    assert error_against(reference_model(folder / "plain"), ours) > 3 * CLOSE


def test_the_reference_computes_the_same(checkpoints):
    folder = checkpoints["fp8 blocks"]
    spec, mesh = parse_model_spec(folder), RankMesh.single()
    build = ExpertsContext(by_reference=True)
    model = build_model(spec, mesh, torch.float32, CPU, get_backend("reference"), experts=build)
    load_weights(model, folder, spec, mesh, progress=False)
    model.finish()
    assert error_against(truth(folder, "fp8 blocks"), mixed_run(model, prompts(500))) < CLOSE


@pytest.mark.parametrize("dialect", DIALECTS)
def test_ranks_hold_consecutive_features_with_their_scales(checkpoints, dialect):
    folder = checkpoints[dialect]
    whole, parts = load(folder), [load(folder, mesh) for mesh in ranks(2)]
    for layer in range(2):
        gate_ups, downs = matrices(whole, layer)
        halves = [matrices(part, layer) for part in parts]
        for slot, (gate_up, down) in enumerate(zip(gate_ups, downs, strict=True)):
            found = [half[0][slot].chunk(2) for half in halves]
            assert torch.equal(torch.cat([half[i] for i in range(2) for half in found]), gate_up)
            assert torch.equal(torch.cat([half[1][slot] for half in halves], dim=1), down)


def test_more_ranks_than_blocks_are_refused(checkpoints):
    with pytest.raises(ConfigError, match=r"256, which is 2 times 128 .* use .* at most 2"):
        mesh = ranks(4)[1]
        mesh.roles["attention"] = mesh.roles["mlp"] = RankMesh.single().roles["mlp"]
        load(checkpoints["fp8 blocks"], mesh)


@pytest.mark.skipif(not CONFIGS.is_dir(), reason="real configs are not here")
@pytest.mark.parametrize(
    ("name", "fewer"),
    [
        ("DeepSeek-R1-0528", {"n_routed_experts": 16, "first_k_dense_replace": 1}),
        ("Qwen3-30B-A3B-FP8", {"num_experts": 16}),
    ],
)
def test_published_configs_build_with_random_weights(name, fewer):
    spec = parse_model_spec(CONFIGS / name, {"num_hidden_layers": 2, "vocab_size": 512} | fewer)
    model = build_model(
        spec, RankMesh.single(), torch.bfloat16, torch.device("meta"), get_backend("reference")
    )
    experts = [layer for layer in model.modules() if isinstance(layer, Experts)]
    assert experts
    for layer in experts:
        num_slots, outputs, inputs = layer.down.weight.shape
        assert layer.down.weight_scale_inv.shape == (num_slots, outputs // 128, inputs // 128)
        assert layer.gate_up.weight_scale_inv.shape == (num_slots, inputs // 64, outputs // 128)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_random_weights_behave_like_those_of_a_plain_model(checkpoints, dialect):
    def logits(folder: Path) -> torch.Tensor:
        spec = parse_model_spec(folder)
        model = build_model(spec, RankMesh.single(), torch.float32, CPU, get_backend("reference"))
        dummy_weights(model, seed=3)
        model.finish()
        return torch.cat(mixed_run(model, prompts(500)))

    ours, plain = logits(checkpoints[dialect]), logits(checkpoints[dialect] / "plain")
    assert torch.isfinite(ours).all()
    assert 0.7 < ours.std() / plain.std() < 1.4
