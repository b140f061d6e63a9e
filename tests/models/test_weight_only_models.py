"""Weight-only checkpoints: the weights bit for bit, the logits of transformers."""

import json

import pytest
import torch
from paged_driver import CPU, mixed_run, prompts
from safetensors.torch import load_file, save_file
from tiny_models import reference_model
from weight_only_models import FILE, LAYOUTS, LEFT, is_left, make_weight_only_checkpoint

from penstock.errors import ConfigError
from penstock.kernels.attention.backend import get_backend
from penstock.kernels.gemm import CpuPackedWeight
from penstock.kernels.gemm.wna16 import weight_only_linear
from penstock.kernels.gemm.wna16_packing import GpuPackedWeight, pack_gpu
from penstock.layers.linear import Linear
from penstock.models.registry import build_model
from penstock.models.spec import parse_model_spec
from penstock.parallel.mesh import RankMesh
from penstock.quantization.choose import Schemes, choose_schemes
from penstock.quantization.unquantized import Unquantized
from penstock.quantization.weight_only import WeightOnlyScheme
from penstock.types.mesh import MeshShape
from penstock.weights.load import dummy_weights, load_weights
from penstock.weights.quantized import gathered
from penstock.weights.stream import stream

SINGLE = RankMesh.single()
CLOSE = 1e-4  # of logits around one; products with codes hold inputs to 23 bits
WHOLE = slice(None)
# Its scale of a matrix is a divisor; what is multiplied with is off by half a unit of fp32.
ROUNDED = {"nvfp4 compressed": torch.bfloat16}
BY_OUTPUT = ("packed 8 bits", "int8", "fp8", "fp8 by matrix")  # scales, which no part cuts
# of scale * code + minimum, by group
NOT_SUMS = ("nf4", "nf4 nested", "gptq ordered", "fp8", "fp8 by matrix")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("coded")
    return {name: make_weight_only_checkpoint(root / name, name) for name in LAYOUTS}


def load(folder, mesh=SINGLE, dtype=torch.float32):
    spec = parse_model_spec(folder)
    schemes = choose_schemes(spec.quantization, folder, dtype, CPU)
    model = build_model(spec, mesh, dtype, CPU, get_backend("reference"), schemes)
    load_weights(model, folder, spec, mesh, progress=False)
    model.finish()
    return model


def matrices(folder):
    """The coded tensors of a checkpoint, by name."""
    codes = parse_model_spec(folder).quantization.weight_only
    found = gathered(stream((folder / FILE,)), codes)
    return {tensor.name: tensor for tensor in found}, load_file(folder / "plain" / FILE)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_numbers_are_those_of_the_checkpoint_bit_for_bit(checkpoints, layout):
    tensors, plain = matrices(checkpoints[layout])
    assert tensors.keys() == plain.keys()
    dtype = ROUNDED.get(layout, torch.float32)
    for name, expected in plain.items():
        module = name.removesuffix(".weight")
        whole = tensors[name].read(tuple(WHOLE for _ in expected.shape))
        assert torch.equal(whole.to(dtype), expected.to(dtype)), name
        if not module.endswith("_proj"):
            continue
        coded = tensors[name].read_quantized((WHOLE, WHOLE), CPU)
        assert (coded is None) == is_left(layout, module), name
        if coded is not None:
            assert torch.equal(coded.values(), whole), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_part_is_that_part_also_where_it_cuts_through_groups_and_words(checkpoints, layout):
    tensors, plain = matrices(checkpoints[layout])
    name = "model.layers.0.mlp.up_proj.weight"
    dtype = ROUNDED.get(layout, torch.float32)
    for part in (
        (slice(3, 77), slice(0, 128)),
        (slice(64, 128), slice(64, 128)),
        (slice(5, 6), slice(24, 104)),
    ):
        found, expected = tensors[name].read(part), plain[name][part]
        assert torch.equal(found.to(dtype), expected.to(dtype)), part
        coded = tensors[name].read_quantized(part, CPU)
        is_whole = part[1] == slice(0, 128)
        if layout == "gptq ordered":
            assert (coded is None) != is_whole
        elif is_whole or part[1].start == 64 or layout in BY_OUTPUT:
            assert torch.equal(coded.values(), found), part


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_a_gpu_reads_is_the_same_matrix(checkpoints, layout):
    tensors, plain = matrices(checkpoints[layout])
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    weight = pack_gpu([tensors[name].read_quantized((WHOLE, WHOLE), CPU) for name in names])
    assert weight is not None
    expected = torch.cat([plain[name] for name in names])
    x = torch.randn(5, expected.shape[1])
    found, dtype = weight_only_linear(torch.eye(expected.shape[1]), weight, None).t(), torch.float32
    dtype = ROUNDED.get(layout, dtype)
    assert torch.equal(found.to(dtype), expected.to(dtype))
    assert torch.allclose(weight_only_linear(x, weight, None), x @ expected.t(), atol=1e-5)
    bits = 8 if "8" in layout else 4
    assert weight.num_bytes < expected.numel() * (bits / 8 + 4 / 32 + 0.2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_are_those_of_transformers_with_the_plain_numbers(checkpoints, layout):
    folder = checkpoints[layout]
    model, theirs = load(folder), reference_model(folder / "plain")
    is_packed = isinstance(model.layers[0].attention.qkv_proj.weight, CpuPackedWeight)
    assert is_packed == (layout not in NOT_SUMS)
    for ids, logits in zip(prompts(500), mixed_run(model, prompts(500)), strict=True):
        with torch.inference_mode():
            expected = theirs(torch.tensor([ids])).logits[0]
        assert torch.allclose(logits, expected, atol=CLOSE, rtol=CLOSE)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_that_keeps_quantized_weights_has_the_same_logits(checkpoints, layout):
    """As on a GPU, with the op's reference."""
    folder, spec = checkpoints[layout], parse_model_spec(checkpoints[layout])
    plain, coded = Unquantized(), WeightOnlyScheme(spec.quantization.weight_only, has_kernel=True)
    schemes = Schemes(tables=plain, linear=lambda names: coded, experts=None)
    model = build_model(spec, SINGLE, torch.float32, CPU, get_backend("reference"), schemes)
    load_weights(model, folder, spec, SINGLE, progress=False)
    model.finish()
    for name, layer in model.named_modules():
        if isinstance(layer, Linear):
            is_plain = name == "layers.1.mlp.down_proj" and is_left(layout, LEFT)
            assert isinstance(layer.weight, GpuPackedWeight) != is_plain, name
    theirs = reference_model(folder / "plain")
    for ids, logits in zip(prompts(500), mixed_run(model, prompts(500)), strict=True):
        with torch.inference_mode():
            expected = theirs(torch.tensor([ids])).logits[0]
        assert torch.allclose(logits, expected, atol=CLOSE, rtol=CLOSE)


@pytest.mark.parametrize("layout", ["awq", "gptq", "packed 8 bits", "nvfp4 modelopt", "fp8", "nf4"])
def test_random_quantized_weights_behave_like_plain_numbers(checkpoints, layout):
    folder = checkpoints[layout]

    def logits(path, schemes):
        spec = parse_model_spec(path)
        model = build_model(spec, SINGLE, torch.float32, CPU, get_backend("reference"), schemes)
        dummy_weights(model, seed=3)
        model.finish()
        return torch.cat(mixed_run(model, prompts(500)))

    codes = parse_model_spec(folder).quantization.weight_only
    coded = WeightOnlyScheme(codes, has_kernel=True)
    schemes = Schemes(tables=Unquantized(), linear=lambda names: coded, experts=None)
    assert 0.7 < logits(folder, schemes).std() / logits(folder / "plain", None).std() < 1.4


@pytest.mark.parametrize("layout", ["awq", "gptq ordered", "nf4"])
def test_a_model_of_16_bits_has_the_rounded_numbers(checkpoints, layout):
    folder = checkpoints[layout]
    model, plain = load(folder, dtype=torch.bfloat16), load_file(folder / "plain" / FILE)
    found = model.layers[0].mlp.down_proj.values()
    assert torch.equal(found, plain["model.layers.0.mlp.down_proj.weight"].bfloat16())


@pytest.mark.parametrize(
    "layout", ["awq", "gptq ordered", "packed asymmetric", "nvfp4 modelopt", "packed 8 bits", "fp8"]
)
def test_ranks_hold_consecutive_parts(checkpoints, layout):
    folder = checkpoints[layout]
    plain = load_file(folder / "plain" / FILE)
    models = [load(folder, RankMesh.place(rank, MeshShape(tp=2))) for rank in range(2)]
    for layer in range(2):
        rows = [rank.layers[layer].mlp.down_proj.values() for rank in models]
        expected = plain[f"model.layers.{layer}.mlp.down_proj.weight"]
        assert torch.allclose(torch.cat(rows, dim=1), expected, rtol=1e-6)
        gates = [rank.layers[layer].mlp.gate_up_proj.values().chunk(2) for rank in models]
        expected = plain[f"model.layers.{layer}.mlp.up_proj.weight"]
        assert torch.allclose(torch.cat([up for _, up in gates]), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("layout", "missing"),
    [
        ("awq", "scales"),
        ("gptq", "qzeros"),
        ("packed", "weight_shape"),
        ("nvfp4 modelopt", "weight"),
        ("nvfp4 compressed", "weight_global_scale"),
        ("fp8", "weight_scale"),
        ("nf4", "weight.quant_map"),
        ("int8", "SCB"),
    ],
)
def test_a_missing_tensor_is_named(checkpoints, tmp_path, layout, missing):
    folder = checkpoints[layout]
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    tensors = load_file(folder / FILE)
    del tensors[f"model.layers.0.mlp.up_proj.{missing}"]
    save_file(tensors, tmp_path / FILE)
    with pytest.raises(ConfigError, match=rf"no 'model.layers.0.mlp.up_proj.{missing}' to go"):
        load(tmp_path)


def test_codes_of_another_kind_than_nf4_are_refused(checkpoints, tmp_path):
    folder = checkpoints["nf4"]
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    tensors = load_file(folder / FILE)
    for name in tensors:
        if name.endswith("quant_map"):
            tensors[name] = torch.linspace(-1, 1, 16)
    save_file(tensors, tmp_path / FILE)
    with pytest.raises(ConfigError, match="nf4 is supported"):
        load(tmp_path)


def test_settings_name_the_layer_that_is_left(checkpoints):
    settings = json.loads((checkpoints["awq"] / "config.json").read_text())["quantization_config"]
    assert settings["modules_to_not_convert"] == ["model.layers.1.mlp.down_proj"]
    weight = load(checkpoints["awq"]).layers[1].mlp.down_proj.weight
    assert not isinstance(weight, CpuPackedWeight)
