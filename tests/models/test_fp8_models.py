"""Checkpoints of 8-bit floats: the weights bit for bit, the logits of transformers that rounds so.

A value in the middle between two 8-bit floats may fall to either side, so logits are compared by
their mean error, which without the rounding would be far larger.
"""

import json
from pathlib import Path

import pytest
import torch
from fp8_models import (
    DIALECTS,
    K_SCALE,
    SHAPE,
    V_SCALE,
    RoundingCache,
    is_left,
    make_fp8_checkpoint,
    truth,
)
from paged_driver import CPU, mixed_run, prompts
from safetensors.torch import load_file, save_file
from tiny_models import reference_model

from penstock.errors import ConfigError
from penstock.kernels.attention.backend import get_backend
from penstock.kernels.gemm.fp8 import dequantized
from penstock.models.registry import build_model
from penstock.models.spec import parse_model_spec
from penstock.parallel.mesh import RankMesh
from penstock.types.mesh import MeshShape
from penstock.weights.load import dummy_weights, load_weights

SINGLE = RankMesh.single()
CLOSE = 0.015  # mean error over mean size of logits: 3e-7 to 0.007; 0.1 to 0.3 without rounding
FILE = "model.safetensors"
FUSED = {
    "attention.qkv_proj": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "attention.o_proj": ["self_attn.o_proj"],
    "mlp.gate_up_proj": ["mlp.gate_proj", "mlp.up_proj"],
    "mlp.down_proj": ["mlp.down_proj"],
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("fp8")
    return {name: make_fp8_checkpoint(root / name, name) for name in DIALECTS}


def load(folder, mesh=SINGLE, cache_dtype=None, **overrides):
    spec = parse_model_spec(folder, overrides)
    model = build_model(
        spec, mesh, torch.float32, CPU, get_backend("reference"), cache_dtype=cache_dtype
    )
    load_weights(model, folder, spec, mesh, progress=False)
    model.finish()
    return model


def ranks(size: int) -> list[RankMesh]:
    return [RankMesh.place(rank, MeshShape(tp=size)) for rank in range(size)]


def weight_of(model, layer: int, name: str) -> torch.Tensor:
    linear = model.layers[layer].get_submodule(name)
    if linear.weight.dtype != torch.float8_e4m3fn:
        return linear.weight.to_dense()
    return dequantized(linear.weight, linear.weight_scale)


@torch.inference_mode()
def error_against(model, ours: list[torch.Tensor], **call) -> float:
    """Mean error of our logits over the mean size of theirs."""
    errors, sizes = [], []
    for ids, logits in zip(prompts(500), ours, strict=True):
        theirs = model(torch.tensor([ids]), **{k: make() for k, make in call.items()}).logits[0]
        errors.append((logits - theirs).abs().mean())
        sizes.append(theirs.abs().mean())
    return float(sum(errors) / sum(sizes))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_weights_are_those_of_the_checkpoint_bit_for_bit(checkpoints, dialect):
    model, plain = load(checkpoints[dialect]), load_file(checkpoints[dialect] / "plain" / FILE)
    for layer in range(2):
        for ours, parts in FUSED.items():
            names = [f"model.layers.{layer}.{part}" for part in parts]
            expected = torch.cat([plain[f"{name}.weight"] for name in names])
            assert torch.equal(weight_of(model, layer, ours), expected), (layer, ours)
            dtype = model.layers[layer].get_submodule(ours).weight.dtype
            assert (dtype == torch.float32) == is_left(dialect, names[0])


@pytest.mark.parametrize("dialect", DIALECTS)
def test_logits_are_those_of_transformers_with_rounded_inputs(checkpoints, dialect):
    folder = checkpoints[dialect]
    ours = mixed_run(load(folder), prompts(500))
    assert error_against(truth(folder, dialect), ours) < CLOSE
    assert error_against(reference_model(folder / "plain"), ours) > 5 * CLOSE


@pytest.mark.parametrize("arch", ["qwen2", "qwen3"])
def test_biases_and_head_norms_go_with_it(tmp_path, arch):
    folder = make_fp8_checkpoint(tmp_path / arch, "fp8 blocks", arch)
    ours = mixed_run(load(folder), prompts(500))
    assert error_against(truth(folder, "fp8 blocks"), ours) < CLOSE


@pytest.mark.parametrize("scales", ["checkpoint", "none"])
def test_a_cache_of_8_bit_floats_rounds_keys_and_values(checkpoints, scales):
    dialect = "modelopt" if scales == "checkpoint" else "fp8 static"
    folder = checkpoints[dialect]
    model = load(folder, cache_dtype=torch.float8_e4m3fn)
    used = (K_SCALE, V_SCALE) if scales == "checkpoint" else (1.0, 1.0)
    attention = model.layers[1].attention
    assert attention.cache_scales == pytest.approx(used)
    assert attention.cache_spec().bytes_per_token() == 2 * 4 * 64
    ours = mixed_run(model, prompts(500))
    model = truth(folder, dialect)
    rounded = error_against(model, ours, past_key_values=lambda: RoundingCache(*used))
    assert rounded < CLOSE and error_against(model, ours) > 5 * CLOSE


def test_scales_of_the_cache_are_left_in_the_file_when_it_is_not_quantized(checkpoints):
    model = load(checkpoints["modelopt"])
    assert model.layers[0].attention.cache_scales == (1.0, 1.0)
    assert model.layers[0].attention.cache_spec().dtype == "float32"


@pytest.mark.parametrize("dialect", DIALECTS)
def test_ranks_hold_consecutive_parts_with_their_scales(checkpoints, dialect):
    folder = checkpoints[dialect]
    whole, parts = load(folder), [load(folder, mesh) for mesh in ranks(2)]
    for layer in range(2):
        for name in ("attention.o_proj", "mlp.down_proj"):
            found = torch.cat([weight_of(part, layer, name) for part in parts], dim=1)
            assert torch.equal(found, weight_of(whole, layer, name))
        gates = [weight_of(part, layer, "mlp.gate_up_proj").chunk(2) for part in parts]
        found = torch.cat([rank[i] for i in range(2) for rank in gates])
        assert torch.equal(found, weight_of(whole, layer, "mlp.gate_up_proj"))
        sizes = [size // 2 * 64 for size in (8, 4, 4)]
        heads = [weight_of(part, layer, "attention.qkv_proj").split(sizes) for part in parts]
        found = torch.cat([rank[i] for i in range(3) for rank in heads])
        assert torch.equal(found, weight_of(whole, layer, "attention.qkv_proj"))


def test_ranks_that_would_cut_a_block_are_refused(checkpoints):
    with pytest.raises(ConfigError, match=r"64 to 128 of 256, cuts through one.*smaller tensor"):
        load(checkpoints["fp8 blocks"], ranks(4)[1])


def test_scales_that_are_powers_of_two_may_be_stored_as_exponents(checkpoints, tmp_path):
    folder = checkpoints["fp8 blocks"]
    settings = json.loads((folder / "config.json").read_text())
    settings["quantization_config"]["scale_fmt"] = "ue8m0"
    tensors = load_file(folder / FILE)
    for name, scale in tensors.items():
        if name.endswith("weight_scale_inv"):
            tensors[name] = torch.exp2(scale.log2().ceil())
    models = []
    for dtype in (torch.float32, torch.float8_e8m0fnu):
        stored = tmp_path / str(dtype)
        stored.mkdir()
        (stored / "config.json").write_text(json.dumps(settings))
        scales = {n: t.to(dtype) for n, t in tensors.items() if n.endswith("weight_scale_inv")}
        save_file(tensors | scales, stored / FILE)
        models.append(load(stored))
    as_numbers, as_exponents = (weight_of(model, 1, "mlp.down_proj") for model in models)
    assert torch.equal(as_numbers, as_exponents)


def test_a_layer_that_is_stored_otherwise_is_named(checkpoints, tmp_path):
    folder = checkpoints["modelopt"]
    for name in ("config.json", "hf_quant_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    tensors = load_file(folder / FILE)
    name = "model.layers.1.self_attn.o_proj.weight"
    save_file(tensors | {name: tensors[name].bfloat16()}, tmp_path / FILE)
    with pytest.raises(ConfigError, match=rf"'{name}' is stored as BF16.*asks for F8_E4M3"):
        load(tmp_path)
    tensors.pop("model.layers.1.mlp.up_proj.input_scale")
    save_file(tensors, tmp_path / FILE)
    with pytest.raises(ConfigError, match=r"missing: model.layers.1.mlp.up_proj.input_scale;"):
        load(tmp_path)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn])
def test_random_weights_behave_like_those_of_a_plain_model(checkpoints, dialect, cache_dtype):
    def logits(folder: Path, cache_dtype) -> torch.Tensor:
        spec = parse_model_spec(folder)
        model = build_model(
            spec, SINGLE, torch.float32, CPU, get_backend("reference"), cache_dtype=cache_dtype
        )
        dummy_weights(model, seed=3)
        model.finish()
        return torch.cat(mixed_run(model, prompts(500)))

    ours = logits(checkpoints[dialect], cache_dtype)
    plain = logits(checkpoints[dialect] / "plain", None)
    assert torch.isfinite(ours).all()
    assert 0.7 < ours.std() / plain.std() < 1.4
    assert SHAPE["hidden_size"] == 256 and len(ours.unique()) > ours.numel() // 2
