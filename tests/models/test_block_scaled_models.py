"""Activations in NVFP4 and MXFP8: the logits of transformers, whose modules are given activations
that are rounded here as the specifications of both say. The references compute; no GPU does."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from mxfp4_models import make_packed_checkpoint
from paged_driver import CPU, mixed_run, prompts
from paged_driver import load_model as load_into_memory
from safetensors.torch import load_file, save_file
from test_modelopt_formats import (
    EXCLUDED,
    FILE,
    FORMATS,
    LEFT,
    ROUNDED,
    SHAPE,
    Quantized,
    expected_logits,
    quantize,
)
from tiny_models import make_checkpoint, reference_model
from torch import Tensor
from weight_only_models import E2M1, nvfp4

from penstock.config.resolve import resolve
from penstock.config.schema import EngineConfig
from penstock.kernels.device import probe
from penstock.kernels.gemm.block_scaled import ScaledWeight
from penstock.models.spec import parse_model_spec
from penstock.parallel.mesh import RankMesh
from penstock.quantization.choose import choose_schemes
from penstock.runtime.model_loader import load_model
from penstock.runtime.timeline import Timeline
from penstock.types.mesh import MeshShape


def to_nvfp4(x: Tensor, outer: Tensor) -> Tensor:
    groups = x.unflatten(-1, (-1, 16))
    scales = (groups.abs().amax(-1, keepdim=True) / 6 / outer).to(torch.float8_e4m3fn).float()
    scaled = groups / (scales * outer).clamp(min=1e-20)
    codes = (scaled.abs()[..., None] - E2M1).abs().argmin(-1)
    return (E2M1[codes] * scaled.sign() * scales * outer).flatten(-2)


def to_mxfp8(x: Tensor) -> Tensor:
    groups = x.unflatten(-1, (-1, 32))
    scale = (groups.abs().amax(-1, keepdim=True) / 448).clamp(min=1e-30).log2().ceil().exp2()
    return ((groups / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)


def w4a4(module: str, weight: Tensor, largest: Tensor) -> Quantized:
    tensors, values = nvfp4(True)(weight)
    outer = largest / (6 * 448)
    return Quantized(tensors | {"input_scale": outer}, values, lambda x: to_nvfp4(x, outer))


@pytest.fixture
def w4a4_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setitem(FORMATS, "NVFP4", ({"group_size": 16}, w4a4))
    make_checkpoint(tmp_path, "llama", **SHAPE)
    settings = {"quant_algo": "NVFP4", "group_size": 16, **EXCLUDED}
    return quantize(tmp_path, lambda module: None if module == LEFT else "NVFP4", settings)


def load(folder: Path, mesh: RankMesh | None = None):
    found = parse_model_spec(folder).quantization
    schemes = choose_schemes(found, folder, torch.float32, CPU, activations=("nvfp4", "mxfp8"))
    return load_into_memory(folder, mesh=mesh or RankMesh.single(), schemes=schemes)


def scaled_weights(model: torch.nn.Module) -> list[ScaledWeight]:
    found = [getattr(layer, "weight", None) for layer in model.modules()]
    return [weight for weight in found if isinstance(weight, ScaledWeight)]


def test_nvfp4_activations_give_the_logits_of_rounded_ones(tmp_path, w4a4_checkpoint):
    sequences = prompts(500)
    model = load(tmp_path)
    assert len(scaled_weights(model)) == 7  # of two layers' four; one is excluded
    ours = torch.cat(mixed_run(model, sequences))
    theirs = torch.cat(expected_logits(tmp_path, w4a4_checkpoint, sequences))
    plain = torch.cat(expected_logits(tmp_path, {}, sequences))
    size = theirs.abs().mean()
    assert (ours - theirs).abs().mean() / size < ROUNDED
    assert (plain - theirs).abs().mean() / size > 5 * ROUNDED  # rounding is no small thing


def test_a_mix_has_nvfp4_activations_where_a_module_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(FORMATS, "NVFP4", ({"group_size": 16}, w4a4))
    make_checkpoint(tmp_path, "llama", **SHAPE)
    names = [name.removesuffix(".weight") for name in load_file(tmp_path / FILE)]
    how = {
        name: {"quant_algo": "NVFP4" if ".mlp." in name else "FP8"}
        for name in names
        if name.endswith("_proj")
    }
    settings = {"quant_algo": "MIXED_PRECISION", "quantized_layers": how}
    rounding = quantize(tmp_path, lambda module: how[module]["quant_algo"], settings)
    model = load(tmp_path)
    assert len(scaled_weights(model)) == 4
    ours = torch.cat(mixed_run(model, prompts(500)))
    theirs = torch.cat(expected_logits(tmp_path, rounding, prompts(500)))
    assert (ours - theirs).abs().mean() / theirs.abs().mean() < ROUNDED


def test_a_rank_has_the_groups_of_its_inputs(tmp_path, w4a4_checkpoint):
    whole = load(tmp_path).layers[0].mlp.down_proj.weight
    parts = [
        load(tmp_path, RankMesh.place(rank, MeshShape(tp=2))).layers[0].mlp.down_proj.weight
        for rank in range(2)
    ]
    assert torch.equal(torch.cat([part.values() for part in parts], 1), whole.values())
    assert all(part.input_scale_1 == whole.input_scale_1 for part in parts)


def test_a_checkpoint_without_scales_of_activations_is_weight_only(tmp_path, w4a4_checkpoint):
    tensors = load_file(tmp_path / FILE)
    without = {name: x for name, x in tensors.items() if not name.endswith("input_scale")}
    save_file(without, tmp_path / FILE)
    model = load(tmp_path)
    assert not scaled_weights(model)
    ours = torch.cat(mixed_run(model, prompts(500)))
    theirs = torch.cat(expected_logits(tmp_path, {}, prompts(500)))
    assert (ours - theirs).abs().mean() / theirs.abs().mean() < 1e-4


def test_nvfp4_activations_of_experts_give_the_logits_of_rounded_ones(tmp_path, monkeypatch):
    """The FP4 checkpoint of DeepSeek-R1 is one of this kind."""
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as theirs

    make_checkpoint(tmp_path, "deepseek_v3", moe_intermediate_size=48)
    outer = torch.tensor(8 / (6 * 448))
    tensors, plain = {}, {}
    for name, weight in load_file(tmp_path / FILE).items():
        tensors[name] = plain[name] = weight
        if ".mlp.experts." in name:
            packed, plain[name] = nvfp4(True)(weight)
            module = name.removesuffix(".weight")
            tensors |= {f"{module}.{key}": x.clone() for key, x in packed.items()}
            tensors[f"{module}.input_scale"] = outer.clone()
    (tmp_path / "plain").mkdir()
    shutil.copy(tmp_path / "config.json", tmp_path / "plain")
    save_file(tensors, tmp_path / FILE)
    save_file(plain, tmp_path / "plain" / FILE, metadata={"format": "pt"})
    left = ["*self_attn*", "*.mlp.gate", "*shared_experts*", "model.layers.0.mlp.*", "lm_head"]
    settings = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": left}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": settings}))

    def forward(self, x, chosen, weights):
        y = torch.zeros_like(x)
        matrices = zip(self.gate_up_proj, self.down_proj, strict=True)
        for number, (gate_up, down) in enumerate(matrices):
            gate, up = F.linear(to_nvfp4(x, outer), gate_up).chunk(2, -1)
            h = F.linear(to_nvfp4(self.act_fn(gate) * up, outer), down)
            y += h * (weights * (chosen == number)).sum(1, keepdim=True)
        return y

    sequences = prompts(500)
    model = load(tmp_path)
    assert len(scaled_weights(model)) == 4  # two layers of experts
    ours = torch.cat(mixed_run(model, sequences))
    plain_logits = torch.cat(expected_logits(tmp_path, {}, sequences))
    monkeypatch.setattr(theirs.DeepseekV3Experts, "forward", forward)
    rounded = torch.cat(expected_logits(tmp_path, {}, sequences))
    size = rounded.abs().mean()
    assert (ours - rounded).abs().mean() / size < ROUNDED
    assert (plain_logits - rounded).abs().mean() / size > 5 * ROUNDED


def test_mxfp8_activations_of_mxfp4_experts_give_the_logits_of_rounded_ones(tmp_path, monkeypatch):
    from transformers.models.gpt_oss import modeling_gpt_oss as theirs

    folder = make_packed_checkpoint(tmp_path)
    sequences = prompts(500)
    model = load(folder)
    assert len(scaled_weights(model)) > 0
    ours = torch.cat(mixed_run(model, sequences))

    def logits() -> Tensor:
        truth = reference_model(folder / "plain")
        with torch.inference_mode():
            return torch.cat([truth(torch.tensor([ids])).logits[0] for ids in sequences])

    plain = logits()
    experts = theirs.GptOssExperts
    forward, gate = experts.forward, experts._apply_gate
    monkeypatch.setattr(experts, "forward", lambda self, x, *a: forward(self, to_mxfp8(x), *a))
    monkeypatch.setattr(experts, "_apply_gate", lambda self, x: to_mxfp8(gate(self, x)))
    rounded = logits()
    size = rounded.abs().mean()
    assert (ours - rounded).abs().mean() / size < ROUNDED / 4
    assert (plain - rounded).abs().mean() / size > ROUNDED / 2


def test_the_setting_reaches_the_layers(tmp_path):
    folder, spec = make_packed_checkpoint(tmp_path), parse_model_spec(tmp_path)
    for asked, is_scaled in (("always", True), ("auto", False)):
        config = EngineConfig(model=str(folder), quantize_activations=asked)
        found = resolve(config, spec, probe(), str(folder))
        model, _, _ = load_model(found, spec, RankMesh.single(), Timeline())
        assert bool(scaled_weights(model)) == is_scaled
