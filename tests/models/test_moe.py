"""Layers of experts: every way to compute them gives the same, and each value is loaded once."""

import pytest
import torch
from gguf_models import QUANT, write_gguf
from paged_driver import CPU, load_model, mixed_run, prompts
from safetensors.torch import load_file, save_file
from tiny_models import make_checkpoint, reference_model

from penstock.errors import ConfigError
from penstock.kernels.attention.backend import get_backend
from penstock.kernels.gemm import CpuPackedWeight
from penstock.layers.context import ExpertsContext
from penstock.layers.moe import in_dtype_without_loss
from penstock.models.registry import build_model
from penstock.models.spec import parse_model_spec
from penstock.parallel.mesh import RankMesh
from penstock.quantization import scheme
from penstock.quantization import unquantized as none
from penstock.quantization.choose import choose_schemes
from penstock.quantization.w8a8 import W8A8Experts
from penstock.types.mesh import MeshShape
from penstock.types.model_spec import QuantSpec, W8A8Spec
from penstock.weights.load import load_weights
from penstock.weights.stored import StoredTensor

SETTINGS = {
    "whole": ExpertsContext(),
    "in pieces": ExpertsContext(max_tokens=4),
    "by reference": ExpertsContext(by_reference=True),
    "by reference, in pieces": ExpertsContext(by_reference=True, max_tokens=1),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("moe"), "qwen2_moe")


def finished(folder, experts: ExpertsContext, dtype: torch.dtype = torch.float32):
    spec, mesh = parse_model_spec(folder), RankMesh.single()
    backend = get_backend("reference")
    model = build_model(spec, mesh, dtype, CPU, backend, experts=experts)
    load_weights(model, folder, spec, mesh, progress=False)
    with torch.inference_mode():
        model.finish()
    return model


@pytest.mark.parametrize("name", SETTINGS)
def test_every_way_gives_the_logits_of_transformers(folder, name, monkeypatch):
    calls = []
    reference, touched = scheme.experts.reference, none.activated_experts
    monkeypatch.setattr(
        scheme.experts, "reference", lambda x, *a: calls.append(("all", len(x))) or reference(x, *a)
    )
    monkeypatch.setattr(
        none, "activated_experts", lambda x, *a: calls.append(("touched", len(x))) or touched(x, *a)
    )
    model, truth = finished(folder, SETTINGS[name]), reference_model(folder)
    texts = prompts(truth.config.vocab_size)
    for text, logits in zip(texts, mixed_run(model, texts), strict=True):
        with torch.inference_mode():
            expected = truth(torch.tensor([text])).logits[0]
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    kinds, sizes = zip(*calls, strict=True)
    assert set(kinds) == {"all" if "reference" in name else "touched"}
    assert max(sizes) == (SETTINGS[name].max_tokens or 17)  # the longest step of the run


def test_the_reference_reads_packed_experts_as_numbers(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, reference_model(make_checkpoint(tmp_path / "hf", "qwen3_moe")), QUANT.Q8_0)
    by_codes, by_reference = (
        load_model(path, schemes=choose_schemes(None, path, torch.float32, CPU, plain))
        for plain in (False, True)
    )
    assert isinstance(by_codes.layers[0].mlp.experts.down.weight[0], CpuPackedWeight)
    assert isinstance(by_reference.layers[0].mlp.experts.down.weight[0], torch.Tensor)
    texts = prompts(500)
    for ours, theirs in zip(
        mixed_run(by_codes, texts), mixed_run(by_reference, texts), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_low_precision_stays_near(folder):
    exact, rounded = (
        mixed_run(finished(folder, ExpertsContext(), dtype), prompts(500))
        for dtype in (torch.float32, torch.bfloat16)
    )
    for ours, theirs in zip(rounded, exact, strict=True):
        assert ours.dtype == torch.bfloat16
        assert 0 < (ours.float() - theirs).norm() / theirs.norm() < 0.08


def test_the_load_of_each_expert_is_counted(folder):
    model = load_model(folder)
    texts = prompts(500)
    mixed_run(model, texts)
    for layer in model.layers:
        load = layer.mlp.experts.load_S
        assert load.sum() == 2 * sum(map(len, texts)) and load.min() >= 0


def test_experts_are_computed_where_the_table_says(folder):
    model, texts = load_model(folder), prompts(500)
    expected = mixed_run(model, texts)
    with torch.inference_mode():
        for layer in model.layers:
            experts = layer.mlp.experts
            order = torch.randperm(6)
            experts.slot_of_E.copy_(order)
            for weight in (experts.gate_up.weight, experts.down.weight):
                weight[order] = weight.clone()
    for ours, theirs in zip(mixed_run(model, texts), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_matrices_lie_by_expert_and_each_rank_reads_its_share_only(folder, monkeypatch):
    stored = load_file(folder / "model.safetensors")
    num_read = {}
    read = StoredTensor.read

    def counted(tensor: StoredTensor, part: tuple[slice, ...]) -> torch.Tensor:
        found = read(tensor, part)
        num_read[tensor.name] = num_read.get(tensor.name, 0) + found.numel()
        return found

    monkeypatch.setattr(StoredTensor, "read", counted)
    halves = []
    for rank in range(2):
        mesh = RankMesh.place(rank, MeshShape(tp=2))
        halves.append(load_model(folder, mesh).layers[1].mlp.experts)
    for number in range(6):
        names = [
            f"model.layers.1.mlp.experts.{number}.{part}_proj.weight"
            for part in ("gate", "up", "down")
        ]
        assert [num_read[name] for name in names] == [stored[name].numel() for name in names]
        gates, ups = zip(*(half.gate_up.weight[number].chunk(2) for half in halves), strict=True)
        downs = [half.down.weight[number] for half in halves]
        for name, parts, dim in zip(names, (gates, ups, downs), (0, 0, 1), strict=True):
            assert torch.equal(torch.cat(parts, dim), stored[name]), name


@pytest.mark.parametrize("arch", ["deepseek_v3", "mixtral", "qwen2_moe", "qwen3_next"])
def test_experts_that_transformers_stacks_are_the_same(tmp_path, arch):
    usual = make_checkpoint(tmp_path / "usual", arch)
    reference_model(usual).save_pretrained(tmp_path / "stacked", save_original_format=False)
    names = load_file(tmp_path / "stacked" / "model.safetensors").keys()
    assert "model.layers.1.mlp.experts.gate_up_proj" in names
    stacked = dict(load_model(tmp_path / "stacked").named_parameters())
    for name, parameter in load_model(usual).named_parameters():
        assert torch.equal(stacked[name], parameter), name


def test_missing_tensors_of_an_expert_are_named(folder, tmp_path):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.4.up_proj.weight"]
    tensors["model.layers.1.mlp.experts.6.up_proj.weight"] = torch.ones(32, 64)
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError) as caught:
        load_model(tmp_path)
    assert "missing: model.layers.1.mlp.experts.4.up_proj.weight;" in str(caught.value)
    assert str(caught.value).endswith("unexpected: model.layers.1.mlp.experts.6.up_proj.weight")


def test_an_expert_that_ranks_cannot_share_is_refused(folder):
    mesh = RankMesh.place(0, MeshShape(dp=3))  # heads stay whole
    with pytest.raises(ConfigError, match="an expert's width is 32, which 3 ranks"):
        load_model(folder, mesh)


def test_experts_that_a_checkpoint_excludes_are_not_quantized():
    spec = QuantSpec(format=W8A8Spec(weights="tensor", inputs="row"), excluded=("*.mlp.experts*",))
    names = ["model.layers.0.mlp.experts.0.gate_proj"]
    schemes = choose_schemes(spec, None, torch.bfloat16, CPU)
    assert isinstance(schemes.experts(names), none.UnquantizedExperts)
    schemes = choose_schemes(QuantSpec(format=spec.format), None, torch.bfloat16, CPU)
    assert isinstance(schemes.experts(names), W8A8Experts)


def test_a_router_becomes_smaller_only_where_no_number_changes():
    weight = torch.randn(8, 32).bfloat16().float()
    assert in_dtype_without_loss(weight, torch.bfloat16).dtype == torch.bfloat16
    weight[3, 5] = 1.0 + 2.0**-12
    assert in_dtype_without_loss(weight, torch.bfloat16) is weight
