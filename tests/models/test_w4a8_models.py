"""INT4 weights with FP8 activations: the logits of transformers, whose modules are given
activations rounded here, as the checkpoint's scales say. The references compute; no GPU does."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from paged_driver import CPU, mixed_run, prompts
from paged_driver import load_model as load_into_memory
from safetensors.torch import load_file, save_file
from test_modelopt_formats import (
    AWQ,
    EXCLUDED,
    FILE,
    FORMATS,
    LEFT,
    ROUNDED,
    Quantized,
    expected_logits,
    input_scales,
    int4,
    is_rounded,
    quantize,
    with_input_scales,
)
from tiny_models import make_checkpoint
from torch import Tensor

from penstock import LLM, SamplingParams
from penstock.config.resolve import resolve
from penstock.config.schema import EngineConfig
from penstock.kernels.device import probe
from penstock.kernels.formats import Fp8Static, Plain
from penstock.kernels.gemm.w4a8 import W4A8Weight
from penstock.layers.fused_quant import converted
from penstock.models.spec import parse_model_spec
from penstock.parallel.mesh import RankMesh
from penstock.quantization.choose import choose_schemes
from penstock.quantization.weight_only import WeightOnlyExperts
from penstock.runtime.model_loader import load_model
from penstock.runtime.timeline import Timeline
from penstock.types.mesh import MeshShape

SHAPE = {  # whole groups, of two ranks, too
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
CLOSE = 0.02  # of a logit; their spread is above 1
SETTINGS = {"quant_algo": "W4A8_AWQ", **AWQ, "group_size": 128, **EXCLUDED}


def w4a8(module: str, weight: Tensor, largest: Tensor) -> Quantized:
    found = with_input_scales(int4(True, 128))(module, weight, largest)
    scales = input_scales(module, weight)
    given = torch.ones(()) if scales is None else scales
    scale = found.tensors["input_scale"] = largest * given.max() / 448

    def rounding(x: Tensor) -> Tensor:
        scaled = (x * given / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float()
        return scaled * scale / given

    return replace(found, rounding=rounding)


@pytest.fixture
def rounding(tmp_path, monkeypatch):
    """A checkpoint lies in the folder. Of activations, by module."""
    monkeypatch.setitem(FORMATS, "W4A8_AWQ", (AWQ, w4a8))
    make_checkpoint(tmp_path, "llama", **SHAPE)
    found = quantize(tmp_path, lambda module: None if module == LEFT else "W4A8_AWQ", SETTINGS)
    assert is_rounded(found)
    return found


def load(folder: Path, mesh: RankMesh | None = None):
    found = parse_model_spec(folder).quantization
    schemes = choose_schemes(found, folder, torch.float32, CPU, activations=("fp8",))
    return load_into_memory(folder, mesh=mesh or RankMesh.single(), schemes=schemes)


def w4a8_weights(model: torch.nn.Module) -> list[W4A8Weight]:
    found = [getattr(layer, "weight", None) for layer in model.modules()]
    return [weight for weight in found if isinstance(weight, W4A8Weight)]


def test_fp8_activations_give_the_logits_of_rounded_ones(tmp_path, rounding):
    sequences = prompts(500)
    model = load(tmp_path)
    assert len(w4a8_weights(model)) == 7  # of two layers' four; one is excluded
    ours = torch.cat(mixed_run(model, sequences))
    theirs = torch.cat(expected_logits(tmp_path, rounding, sequences))
    plain = torch.cat(expected_logits(tmp_path, {}, sequences))
    size = theirs.abs().mean()
    assert (ours - theirs).abs().mean() / size < ROUNDED / 3
    assert (plain - theirs).abs().mean() / size > ROUNDED  # rounding is no small thing


def test_a_norm_gives_fp8_where_it_has_taken_up_the_scales(tmp_path, rounding):
    """The second layer's scales per input are in its norms, the first one's are not."""
    first, second = load(tmp_path).layers
    for layer, wanted in ((first, Plain), (second, Fp8Static)):
        linear = layer.mlp.gate_up_proj
        assert type(linear.scheme.input_format(linear, 1)) is wanted


def test_two_ranks_have_the_groups_of_their_inputs_and_one_scale(tmp_path, rounding):
    module = "model.layers.0.mlp.down_proj"
    x = torch.randn(3, SHAPE["intermediate_size"], generator=torch.Generator().manual_seed(3))
    weight = load_file(tmp_path / "plain" / FILE)[f"{module}.weight"]
    parts, half = [], SHAPE["intermediate_size"] // 2
    for rank in range(2):
        layer = load(tmp_path, RankMesh.place(rank, MeshShape(tp=2))).layers[0].mlp.down_proj
        assert isinstance(layer.weight, W4A8Weight)
        mine = converted(
            x[:, rank * half : (rank + 1) * half], layer.scheme.input_format(layer, len(x))
        )
        parts.append(layer.scheme.apply(layer, mine, add_bias=False))
    expected = rounding[module](x) @ weight.T
    torch.testing.assert_close(sum(parts), expected, atol=1e-3, rtol=1e-3)


@torch.inference_mode()
def test_two_ranks_write_the_tokens_of_rounded_activations(tmp_path, rounding):
    settings = {"device": "cpu", "num_threads": 1, "quantize_activations": "always"}
    asked = prompts(500)
    with LLM(str(tmp_path), **settings, tensor_parallel_size=2) as llm:
        answers = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in asked],
            SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True),
        )
    written = [list(answer.outputs[0].token_ids) for answer in answers]
    sequences = [prompt + tokens for prompt, tokens in zip(asked, written, strict=True)]
    for tokens, logits in zip(written, expected_logits(tmp_path, rounding, sequences), strict=True):
        before = logits[-len(tokens) - 1 : -1]
        chosen = before.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert float((before.amax(-1) - chosen).max()) < CLOSE


def test_modules_without_a_scale_of_activations_are_weight_only(tmp_path, rounding):
    tensors = load_file(tmp_path / FILE)
    fused = ("q_proj.input_scale", "gate_proj.input_scale")  # one part of each is enough
    left = {name: x for name, x in tensors.items() if not name.endswith(fused)}
    assert len(left) == len(tensors) - 4
    save_file(left, tmp_path / FILE)
    model = load(tmp_path)
    assert len(w4a8_weights(model)) == 3
    for name in [one for one in rounding if one.split(".")[-1] not in ("o_proj", "down_proj")]:
        rounding[name] = None
    ours = torch.cat(mixed_run(model, prompts(500)))
    theirs = torch.cat(expected_logits(tmp_path, rounding, prompts(500)))
    assert (ours - theirs).abs().mean() / theirs.abs().mean() < ROUNDED / 3


def test_experts_are_weight_only(tmp_path, rounding):
    found = parse_model_spec(tmp_path).quantization
    schemes = choose_schemes(found, tmp_path, torch.bfloat16, CPU, activations=("fp8",))
    assert type(schemes.experts(["model.layers.0.mlp.experts"])) is WeightOnlyExperts


def test_the_setting_reaches_the_layers(tmp_path, rounding):
    spec = parse_model_spec(tmp_path)
    for asked, num_w4a8 in (("always", 7), ("auto", 0)):
        config = EngineConfig(model=str(tmp_path), quantize_activations=asked)
        found = resolve(config, spec, probe(), str(tmp_path))
        model, _, _ = load_model(found, spec, RankMesh.single(), Timeline())
        assert len(w4a8_weights(model)) == num_w4a8


def test_random_weights_are_multiplied_so_too(tmp_path, rounding):
    spec = parse_model_spec(tmp_path)
    settings = {"load_format": "dummy", "quantize_activations": "always"}
    config = EngineConfig(model=str(tmp_path), **settings)
    found = resolve(config, spec, probe(), str(tmp_path))
    model, _, _ = load_model(found, spec, RankMesh.single(), Timeline())
    assert len(w4a8_weights(model)) == 7
    assert torch.cat(mixed_run(model, prompts(500))).isfinite().all()
