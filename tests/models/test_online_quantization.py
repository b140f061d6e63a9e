"""Plain checkpoints that are quantized while loading, by the rules of ones that were before."""

import pytest
import torch
from paged_driver import CPU, mixed_run, prompts
from safetensors.torch import load_file
from tiny_models import make_checkpoint, reference_model
from weight_only_models import FILE, SHAPE, nf4

from penstock.errors import ConfigError
from penstock.kernels.attention.backend import get_backend
from penstock.kernels.gemm.wna16_packing import GpuPackedWeight
from penstock.models.registry import build_model
from penstock.models.spec import parse_model_spec
from penstock.parallel.mesh import RankMesh
from penstock.quantization.choose import Schemes, choose_schemes
from penstock.quantization.unquantized import Unquantized
from penstock.quantization.weight_only import WeightOnlyExperts
from penstock.weights.load import dummy_weights, load_weights

SINGLE = RankMesh.single()
WIDE = SHAPE | {"hidden_size": 256, "intermediate_size": 384}
# mean error over mean size of logits against the plain model: as found, with some room
FAR = {"fp8": 0.2, "fp8_block": 0.2, "int8": 0.06, "nf4": 0.5}
DTYPES = {"fp8": torch.float8_e4m3fn, "fp8_block": torch.float8_e4m3fn, "int8": torch.int8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    make_checkpoint(folder, "llama", **WIDE)
    return folder


def build(folder, made):
    spec = parse_model_spec(folder)
    schemes = choose_schemes(spec.quantization, folder, torch.float32, CPU, online=made)
    return spec, build_model(spec, SINGLE, torch.float32, CPU, get_backend("reference"), schemes)


def load(folder, made):
    spec, model = build(folder, made)
    load_weights(model, folder, spec, SINGLE, progress=False)
    return model


def quantized(weight, made):
    """By the formats' definitions: the numbers that a weight becomes."""
    if made == "nf4":
        return nf4(nested=False)(weight)[1]
    if made == "fp8_block":
        blocks = weight.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
        scale = blocks.abs().amax((1, 3), keepdim=True) / 448
        values = (blocks / scale).to(torch.float8_e4m3fn).float() * scale
        return values.flatten(2).flatten(0, 1)
    largest = 127 if made == "int8" else 448
    scale = weight.abs().amax(1, keepdim=True) / largest
    scaled = weight / scale
    return (scaled.round() if made == "int8" else scaled.to(torch.float8_e4m3fn).float()) * scale


@pytest.mark.parametrize("made", FAR)
def test_weights_become_numbers_of_the_format(folder, made):
    model, plain = load(folder, made), load_file(folder / FILE)
    linear = model.layers[1].mlp.gate_up_proj
    assert linear.weight.numel() == 0  # nothing is held until the layer is finished
    model.finish()
    parts = [plain[f"model.layers.1.mlp.{name}_proj.weight"].float() for name in ("gate", "up")]
    assert torch.equal(linear.values(), quantized(torch.cat(parts), made))
    if made in DTYPES:
        assert linear.weight.dtype == DTYPES[made]


@pytest.mark.parametrize("made", FAR)
def test_logits_are_near_those_of_the_plain_model(folder, made):
    model = load(folder, made)
    model.finish()
    theirs, errors, sizes = reference_model(folder), 0.0, 0.0
    for ids, logits in zip(prompts(500), mixed_run(model, prompts(500)), strict=True):
        with torch.inference_mode():
            expected = theirs(torch.tensor([ids])).logits[0]
        errors += float((logits - expected).abs().mean())
        sizes += float(expected.abs().mean())
    assert 0.002 < errors / sizes < FAR[made]


@pytest.mark.parametrize("made", FAR)
def test_random_weights_may_be_quantized_too(folder, made):
    _, model = build(folder, made)
    dummy_weights(model, seed=3)
    model.finish()
    logits = torch.cat(mixed_run(model, prompts(500)))
    assert torch.isfinite(logits).all() and logits.std() > 0.1


def test_blocks_that_do_not_fit_are_refused(tmp_path):
    make_checkpoint(tmp_path, "llama", **SHAPE)
    with pytest.raises(ConfigError, match=r"whole 128 inputs; one has 192.*use fp8"):
        build(tmp_path, "fp8_block")


@pytest.mark.parametrize("made", FAR)
def test_experts_are_quantized_each_for_itself(tmp_path, made):
    sizes = {"moe_intermediate_size": 128, "hidden_size": 128, "head_dim": 32}
    make_checkpoint(tmp_path, "qwen3_moe", **sizes)
    model, plain = load(tmp_path, made), load_file(tmp_path / FILE)
    model.finish()
    experts = model.layers[0].mlp.experts
    names = [f"model.layers.0.mlp.experts.2.{part}_proj.weight" for part in ("gate", "up")]
    expected = quantized(torch.cat([plain[name].float() for name in names]), made)
    found = experts.gate_up.weight
    found = found[2].to_dense() if isinstance(found, list) else found.matrix(2)
    assert torch.equal(found, expected)
    theirs = reference_model(tmp_path)
    (ids, *_), (logits, *_) = prompts(500), mixed_run(model, prompts(500))
    with torch.inference_mode():
        error = (logits - theirs(torch.tensor([ids])).logits[0]).abs().mean()
    assert error < (0.3 if made != "nf4" else 0.6)


@pytest.mark.parametrize("made", ["nf4", "int8"])
def test_experts_that_are_kept_quantized_are_the_same(tmp_path, made):
    """As on a GPU, with the op's reference."""
    sizes = {"moe_intermediate_size": 128, "hidden_size": 128, "head_dim": 32}
    make_checkpoint(tmp_path, "qwen3_moe", **sizes)
    spec, plain, logits = parse_model_spec(tmp_path), Unquantized(), []
    for has_kernel in (False, True):
        experts = WeightOnlyExperts(None, has_kernel, made)
        schemes = Schemes(
            tables=plain, linear=lambda names: plain, experts=lambda names, e=experts: e
        )
        model = build_model(spec, SINGLE, torch.float32, CPU, get_backend("reference"), schemes)
        load_weights(model, tmp_path, spec, SINGLE, progress=False)
        model.finish()
        is_coded = isinstance(model.layers[0].mlp.experts.down.weight, GpuPackedWeight)
        assert is_coded == has_kernel
        logits.append(torch.cat(mixed_run(model, prompts(500))))
    assert torch.allclose(*logits, atol=1e-4)
