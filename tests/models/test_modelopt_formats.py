"""Checkpoints in ModelOpt's tensor layouts: the logits of transformers with what they stand for.

The quantization here is written with torch alone, as ModelOpt exports it: INT4 codes of two outputs
in a byte, scales per input (`pre_quant_scale`) beside them, a format for each layer in mixed ones.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from paged_driver import CPU, load_model, mixed_run, prompts
from safetensors.torch import load_file, save_file
from tiny_models import make_checkpoint, reference_model
from torch import Tensor
from weight_only_models import FILE, LEFT, SHAPE, nvfp4

from penstock.errors import ConfigError
from penstock.kernels.gemm.wna16_packing import GpuPackedWeight
from penstock.models.spec import parse_model_spec
from penstock.parallel.mesh import RankMesh
from penstock.quantization.choose import Schemes, choose_schemes
from penstock.quantization.input_scales import InputScaled
from penstock.quantization.unquantized import Unquantized
from penstock.quantization.weight_only import WeightOnlyScheme
from penstock.types.mesh import MeshShape

SINGLE = RankMesh.single()
CLOSE = 1e-4  # mean error over mean size of logits
ROUNDED = 0.015  # activations near the middle between two values fall to either side
BLOCKS_SHAPE = {  # whole blocks of 128
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


@dataclass
class Quantized:
    tensors: dict[str, Tensor]  # by suffix
    values: Tensor  # what they stand for, for activations as they come
    rounding: Callable[[Tensor], Tensor] | None = None  # of activations


def input_scales(module: str, weight: Tensor) -> Tensor | None:
    """Those of fused matrices are the same. In the second layer norms have taken them up."""
    if "layers.1." in module and not module.endswith(("o_proj", "down_proj")):
        return None
    generator = torch.Generator().manual_seed(weight.shape[1])
    return torch.rand(weight.shape[1], generator=generator) + 0.5


def with_input_scales(
    pack: Callable[[Tensor], Quantized],
) -> Callable[[str, Tensor, Tensor], Quantized]:
    """The matrix that makes up for the scales is quantized, and meant to be given scaled inputs."""

    def packed(module: str, weight: Tensor, largest: Tensor) -> Quantized:
        scales = input_scales(module, weight)
        if scales is None:
            return pack(weight)
        found = pack(weight / scales)
        found.tensors["pre_quant_scale"] = scales
        found.values = found.values * scales
        return found

    return packed


def int4(is_w4a8: bool, group: int = 32) -> Callable[[Tensor], Quantized]:
    def pack(weight: Tensor) -> Quantized:
        groups = weight.unflatten(1, (-1, group))
        scales = groups.abs().amax(-1) / 7
        codes = (groups / scales[..., None]).round().clamp(-8, 7).flatten(1).to(torch.int8)
        codes[0, 0] = -8  # no rounding to nearest gives it
        values = (codes.unflatten(1, (-1, group)) * scales[..., None]).flatten(1)
        pairs = codes.view(torch.uint8) & 15
        tensors = {"weight": pairs[::2] | pairs[1::2] << 4, "weight_scale": scales}
        if is_w4a8:
            tensors |= {"weight_scale_2": values.abs().amax() / 448}
            tensors |= {"input_scale": torch.tensor(0.02)}
        return Quantized(tensors, values)

    return pack


def int8_sq(module: str, weight: Tensor, largest: Tensor) -> Quantized:
    scales = input_scales(module, weight)
    given = 1.0 if scales is None else scales
    scale_O = (weight / given).abs().amax(1) / 127
    codes = (weight / given / scale_O[:, None]).round().to(torch.int8)
    input_scale = largest * 1.5 / 127

    def rounding(x: Tensor) -> Tensor:
        scaled = (x * given / input_scale).round().clamp(-127, 127)
        return scaled * input_scale / given

    tensors = {"weight": codes, "weight_scale": scale_O, "input_scale": input_scale}
    if scales is not None:
        tensors["pre_quant_scale"] = scales
    return Quantized(tensors, codes * scale_O[:, None] * given, rounding)


def fp8_blocks(module: str, weight: Tensor, largest: Tensor) -> Quantized:
    blocks = weight.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
    scales = blocks.abs().amax((1, 3), keepdim=True) / 448
    codes = (blocks / scales).to(torch.float8_e4m3fn)
    values = (codes.float() * scales).flatten(2).flatten(0, 1)
    return Quantized({"weight": codes.flatten(2).flatten(0, 1), "weight_scale": scales}, values)


def fp8(module: str, weight: Tensor, largest: Tensor) -> Quantized:
    scale, input_scale = weight.abs().amax() / 448, largest / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)

    def rounding(x: Tensor) -> Tensor:
        return (x / input_scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * input_scale

    tensors = {"weight": codes, "weight_scale": scale, "input_scale": input_scale}
    return Quantized(tensors, codes.float() * scale, rounding)


def plain_nvfp4(weight: Tensor) -> Quantized:
    return Quantized(*nvfp4(True)(weight))


AWQ = {"group_size": 32, "has_zero_point": False, "pre_quant_scale": True}
EXCLUDED = {"exclude_modules": ["lm_head", LEFT]}
FORMATS = {
    "W4A16_AWQ": (AWQ, with_input_scales(int4(False))),
    "W4A8_AWQ": (AWQ, with_input_scales(int4(True))),
    "NVFP4_AWQ": ({"group_size": 16}, with_input_scales(plain_nvfp4)),
    "W4A8_NVFP4_FP8": ({"group_size": 16}, lambda _, weight, largest: plain_nvfp4(weight)),
    "FP8_PB_WO": ({}, fp8_blocks),
    "W8A8_SQ_PER_CHANNEL": ({}, int8_sq),
    "FP8": ({}, fp8),
}
MIXES = {
    "attention in FP8, MLPs in W4A16_AWQ": {
        "self_attn": "FP8",
        "mlp": "W4A16_AWQ",
    },
    "by layer": {
        "layers.0.self_attn": "W8A8_SQ_PER_CHANNEL",
        "layers.0.mlp": "NVFP4_AWQ",
        "layers.1.self_attn": "FP8_PB_WO",
        "layers.1.mlp.gate_proj": "W4A8_AWQ",
        "layers.1.mlp.up_proj": "W4A8_AWQ",
    },
}


def largest_inputs(folder: Path) -> dict[str, Tensor]:
    """Alike for what is fused: the exporter sees to that."""
    model, found = reference_model(folder), {}
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.register_forward_pre_hook(
                lambda _, args, name=name: found.update({name: args[0].abs().amax()})
            )
    with torch.no_grad():
        model(torch.arange(3, 99)[None])
    return found


def quantize(folder: Path, of_module: Callable[[str], str | None], settings: dict) -> dict:
    """Quantizes the checkpoint in its place; returns the rounding of activations by module."""
    (folder / "plain").mkdir()
    shutil.copy(folder / "config.json", folder / "plain")
    largest, rounding = largest_inputs(folder), {}
    tensors, plain = {}, {}
    for name, weight in load_file(folder / FILE).items():
        module = name.removesuffix(".weight")
        algorithm = of_module(module) if module.endswith("_proj") else None
        if algorithm is None:
            tensors[name] = plain[name] = weight
            continue
        found = FORMATS[algorithm][1](module, weight, largest[module])
        tensors |= {f"{module}.{key}": x.contiguous() for key, x in found.tensors.items()}
        plain[name], rounding[module] = found.values, found.rounding
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": settings}))
    save_file(tensors, folder / FILE)
    save_file(plain, folder / "plain" / FILE, metadata={"format": "pt"})
    return rounding


@torch.inference_mode()
def expected_logits(folder: Path, rounding: dict, sequences: list[list[int]]) -> list[Tensor]:
    model = reference_model(folder / "plain")
    for name, module in model.named_modules():
        if (rounded := rounding.get(name)) is not None:
            module.register_forward_pre_hook(lambda _, args, rounded=rounded: (rounded(args[0]),))
    return [model(torch.tensor([ids])).logits[0] for ids in sequences]


def load(folder: Path):
    schemes = choose_schemes(parse_model_spec(folder).quantization, folder, torch.float32, CPU)
    return load_model(folder, schemes=schemes)


def check(folder: Path, rounding: dict, tolerance: float) -> None:
    sequences = prompts(500)
    ours = torch.cat(mixed_run(load(folder), sequences))
    theirs = torch.cat(expected_logits(folder, rounding, sequences))
    assert (ours - theirs).abs().mean() / theirs.abs().mean() < tolerance


def is_rounded(rounding: dict) -> bool:
    return any(rounded is not None for rounded in rounding.values())


@pytest.mark.parametrize("algorithm", [name for name in FORMATS if name != "FP8"])
def test_logits_are_those_of_what_the_checkpoint_stands_for(tmp_path, algorithm):
    shape = BLOCKS_SHAPE if algorithm == "FP8_PB_WO" else SHAPE
    make_checkpoint(tmp_path, "llama", **shape)
    settings = {"quant_algo": algorithm, **FORMATS[algorithm][0], **EXCLUDED}
    rounding = quantize(tmp_path, lambda module: None if module == LEFT else algorithm, settings)
    check(tmp_path, rounding, ROUNDED if is_rounded(rounding) else CLOSE)


@pytest.mark.parametrize("arch", ["phi3", "glm4"])
def test_scales_per_input_of_fused_and_of_reordered_matrices(tmp_path, arch):
    make_checkpoint(tmp_path, arch, **SHAPE)
    settings = {"quant_algo": "W4A16_AWQ", **AWQ, **EXCLUDED}
    rounding = quantize(tmp_path, lambda module: None if module == LEFT else "W4A16_AWQ", settings)
    check(tmp_path, rounding, CLOSE)


@pytest.mark.parametrize("mix", MIXES)
def test_each_layer_of_a_mix_has_its_own_format(tmp_path, mix):
    make_checkpoint(tmp_path, "llama", **BLOCKS_SHAPE)

    def of_module(module: str) -> str | None:
        words = module.removeprefix("model.")
        return next((algo for part, algo in MIXES[mix].items() if part in words), None)

    modules = {
        name.removesuffix(".weight")
        for name in load_file(tmp_path / FILE)
        if name.endswith("_proj.weight")
    }
    layers = {
        module: {"quant_algo": algorithm, **FORMATS[algorithm][0]}
        for module in sorted(modules)
        if (algorithm := of_module(module)) is not None
    }
    settings = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    rounding = quantize(tmp_path, of_module, settings)
    found = parse_model_spec(tmp_path).quantization
    assert found is not None and len(found.mixed) == len(set(MIXES[mix].values()))
    check(tmp_path, rounding, ROUNDED)


def test_a_mix_within_one_matrix_is_refused(tmp_path):
    make_checkpoint(tmp_path, "llama", **BLOCKS_SHAPE)
    layers = {"model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"}}
    settings = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": settings}))
    with pytest.raises(ConfigError, match=r"q_proj, .*differently, which are multiplied as one"):
        load_model(tmp_path)


def test_scales_per_input_that_differ_within_one_matrix_are_refused(tmp_path):
    make_checkpoint(tmp_path, "llama", **SHAPE)
    settings = {"quant_algo": "W4A16_AWQ", **AWQ, **EXCLUDED}
    quantize(tmp_path, lambda module: None if module == LEFT else "W4A16_AWQ", settings)
    tensors = load_file(tmp_path / FILE)
    tensors["model.layers.1.mlp.up_proj.pre_quant_scale"] = torch.full((128,), 2.0)
    save_file(tensors, tmp_path / FILE)
    with pytest.raises(ConfigError, match="pre_quant_scale for each of several matrices"):
        load(tmp_path)


def test_a_rank_has_the_scales_of_its_inputs_and_a_gpu_the_codes_packed(tmp_path):
    """The scheme of a GPU, its kernel's reference on this CPU."""
    make_checkpoint(tmp_path, "llama", **SHAPE)
    settings = {"quant_algo": "W4A8_AWQ", **AWQ, **EXCLUDED}
    quantize(tmp_path, lambda module: None if module == LEFT else "W4A8_AWQ", settings)
    spec = parse_model_spec(tmp_path)
    assert spec.quantization is not None
    scheme = InputScaled(WeightOnlyScheme(spec.quantization.weight_only, has_kernel=True))
    plain = Unquantized()
    schemes = Schemes(
        tables=plain,
        linear=lambda names: plain if LEFT in names else scheme,
        experts=lambda names: None,  # type: ignore[arg-type, return-value]
    )
    expected = load_file(tmp_path / "plain" / FILE)["model.layers.0.mlp.down_proj.weight"]
    x = torch.randn(3, SHAPE["intermediate_size"], generator=torch.Generator().manual_seed(3))
    parts = []
    for rank in range(2):
        mesh = RankMesh.place(rank, MeshShape(tp=2))
        model = load_model(tmp_path, mesh=mesh, schemes=schemes)
        layer = model.layers[0].mlp.down_proj
        assert type(layer.weight) is GpuPackedWeight and layer.device == CPU
        half = SHAPE["intermediate_size"] // 2
        mine = x[:, rank * half : (rank + 1) * half]
        parts.append(scheme.apply(layer, mine, add_bias=False))
    torch.testing.assert_close(sum(parts), x @ expected.T, atol=1e-3, rtol=1e-3)
