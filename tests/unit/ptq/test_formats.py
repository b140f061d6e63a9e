"""What is packed is read back as the same numbers, here and by the libraries of the layouts."""

import json

import pytest
import torch
from safetensors.torch import save_file

from penstock.ptq.formats import FORMATS, grid_of, settings
from penstock.ptq.search import (
    awq_scales,
    compensated,
    error,
    smoothing_scales,
)
from penstock.quantization.quant_config import parse_quantization
from penstock.weights.quantized import gathered
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


def nearest(weight, format, group):
    return grid_of(weight, format, group).packed(weight)


@pytest.mark.parametrize("format", FORMATS)
def test_the_nearest_numbers_are_near(weight, format):
    found = nearest(weight, format, GROUP).values_OI
    assert 0.001 < (found - weight).norm() / weight.norm() < ERRORS[format]


@pytest.mark.parametrize("format", [*CODED, "fp8"])
def test_what_is_packed_is_read_back(tmp_path, weight, format):
    made = nearest(weight, format, GROUP)
    tensors = {f"m.{name}": tensor.contiguous() for name, tensor in made.tensors.items()}
    save_file(tensors, tmp_path / "w.safetensors")
    raw = settings(format, GROUP, ["lm_head"], input_bits=16)
    spec = parse_quantization(json.loads(json.dumps(raw)))
    (found,) = gathered(stream((tmp_path / "w.safetensors",)), spec.weight_only)
    values = found.read_quantized((slice(None), slice(None)), CPU).values()
    assert torch.allclose(values, made.values_OI, rtol=2e-7, atol=0)


@pytest.mark.parametrize("format", FORMATS)
def test_settings_name_what_is_left(format):
    spec = parse_quantization(settings(format, GROUP, ["lm_head", "model.layers.0.mlp.gate"]))
    assert (spec.weight_only is None) == (format in ("fp8", "int8_sq"))
    assert any("mlp.gate" in pattern for pattern in spec.excluded)


@pytest.mark.parametrize("format", FORMATS)
def test_columns_that_make_up_for_others_lose_less_than_rounding(weight, moments, format):
    matrix, _, _ = moments
    grid = grid_of(weight, format, GROUP, matrix.diagonal())
    found, plain = compensated(weight, matrix, grid).values_OI, grid.packed(weight).values_OI
    assert torch.equal(grid.packed(found).values_OI, found)  # numbers of the grid
    assert error(weight, found, matrix) < 0.6 * error(weight, plain, matrix)


def test_scales_are_those_with_which_outputs_lose_least(weight, moments):
    matrix, _, _ = moments
    for format in [*CODED, "fp8"]:
        known, alike = (
            grid_of(weight, format, GROUP, square).packed(weight).values_OI
            for square in (matrix.diagonal(), None)
        )
        lost = [((x - weight).square() @ matrix.diagonal()).sum() for x in (known, alike)]
        assert lost[0] < lost[1], format


def test_8_bit_floats_lie_where_an_octave_loses_least_and_none_is_cut(weight, moments):
    square = moments[0].diagonal()
    whole = weight.abs().amax(1, keepdim=True) / 448
    plain = (weight / whole).to(torch.float8_e4m3fn).float() * whole
    made = grid_of(weight, "fp8", GROUP, square).packed(weight)
    stored, scale = made.tensors["weight"].float(), made.tensors["weight_scale"]
    assert torch.equal(stored * scale, made.values_OI)
    assert (scale >= whole).all() and (scale < 2 * whole).all()
    assert ((made.values_OI - weight).abs() <= torch.maximum(weight.abs() / 16, scale / 1024)).all()
    lost, lost_plain = ((x - weight).square() @ square for x in (made.values_OI, plain))
    assert (lost <= lost_plain).all() and lost.sum() < 0.9 * lost_plain.sum()


def test_awq_moves_large_inputs_into_the_weights(weight, moments):
    matrix, mean, _ = moments
    scales = awq_scales(weight, matrix, mean, GROUP)
    square = matrix.diagonal()
    plain = grid_of(weight, "awq", GROUP, square).packed(weight).values_OI
    moved = grid_of(weight * scales, "awq", GROUP, square / scales**2).packed(weight * scales)
    moved = moved.values_OI / scales
    assert scales[:4].mean() > 2 * scales[4:].mean()
    assert error(weight, moved, matrix) < 0.9 * error(weight, plain, matrix)


def test_smoothing_makes_inputs_and_weights_equally_large(weight, moments):
    _, _, largest = moments
    scales = smoothing_scales(weight, largest)
    assert torch.allclose(largest / scales, (weight * scales).abs().amax(0), rtol=1e-4)
