"""What is packed is read back as the same numbers, here and by the libraries of the layouts."""

import json

import pytest
import torch
from safetensors.torch import save_file

from penstock.quant.parse import parse_quantization
from penstock.quantize.formats import FORMATS, nearest, settings
from penstock.quantize.search import awq_scales, error, gptq_codes, smoothing_scales
from penstock.weights.coded import gathered
from penstock.weights.stream import stream

CPU, GROUP = torch.device("cpu"), 128
CODED = [format for format in FORMATS if format not in ("fp8", "int8_sq")]
ERRORS = {"fp8": 0.03, "int8_sq": 0.01, "nvfp4": 0.11, "mxfp4": 0.14, "awq": 0.12, "gptq": 0.12}


@pytest.fixture
def weight():
    return torch.randn(64, 256, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def moments():
    """Of inputs that go together, and of which some are large."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(512, 32, generator=generator) @ torch.randn(32, 256, generator=generator)
    x += 0.3 * torch.randn(512, 256, generator=generator)
    x[:, :4] *= 20
    return x.t() @ x / len(x), x.abs().mean(0), x.abs().amax(0)


@pytest.mark.parametrize("format", FORMATS)
def test_the_nearest_numbers_are_near(weight, format):
    found = nearest(weight, format, GROUP).values_OI
    assert 0.001 < (found - weight).norm() / weight.norm() < ERRORS[format]


@pytest.mark.parametrize("format", CODED)
def test_what_is_packed_is_read_back(tmp_path, weight, format):
    made = nearest(weight, format, GROUP)
    tensors = {f"m.{name}": tensor.contiguous() for name, tensor in made.tensors.items()}
    save_file(tensors, tmp_path / "w.safetensors")
    spec = parse_quantization(json.loads(json.dumps(settings(format, GROUP, ["lm_head"]))))
    (found,) = gathered(stream((tmp_path / "w.safetensors",)), spec.codes)
    values = found.read_coded((slice(None), slice(None)), CPU).values()
    assert torch.allclose(values, made.values_OI, rtol=2e-7, atol=0)


@pytest.mark.parametrize("format", FORMATS)
def test_settings_name_what_is_left(format):
    spec = parse_quantization(settings(format, GROUP, ["lm_head", "model.layers.0.mlp.gate"]))
    assert (spec.codes is None) == (format in ("fp8", "int8_sq"))
    assert any("mlp.gate" in pattern for pattern in spec.excluded)


def test_gptq_loses_less_than_rounding(weight, moments):
    matrix, _, _ = moments
    codes, scales = gptq_codes(weight, matrix, GROUP)
    assert codes.min() >= 0 and codes.max() <= 15 and scales.shape == (64, 2)
    values = ((codes - 8).unflatten(1, (2, -1)) * scales.float()[..., None]).flatten(1)
    assert error(weight, values, matrix) < 0.6 * error(
        weight, nearest(weight, "gptq", GROUP).values_OI, matrix
    )


def test_awq_moves_large_inputs_into_the_weights(weight, moments):
    matrix, mean, _ = moments
    scales = awq_scales(weight, matrix, mean, GROUP)
    plain = nearest(weight, "awq", GROUP).values_OI
    moved = nearest(weight * scales, "awq", GROUP).values_OI / scales
    assert scales[:4].mean() > 2 * scales[4:].mean()
    assert error(weight, moved, matrix) < 0.8 * error(weight, plain, matrix)


def test_smoothing_makes_inputs_and_weights_equally_large(weight, moments):
    _, _, largest = moments
    scales = smoothing_scales(weight, largest)
    assert torch.allclose(largest / scales, (weight * scales).abs().amax(0), rtol=1e-4)
