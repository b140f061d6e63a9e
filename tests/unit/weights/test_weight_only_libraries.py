"""Matrices packed by the libraries that define the layouts: read here, equal bit for bit.

Each test needs its library and is skipped without it.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_checkpoint
from torch import Tensor, nn

from penstock.kernels.attention.backend import get_backend
from penstock.kernels.gemm.fp8 import dequantized
from penstock.kernels.quantized_weight import QuantizedWeight, quantize_nf4
from penstock.models.registry import build_model
from penstock.models.spec import parse_model_spec
from penstock.parallel.mesh import RankMesh
from penstock.quantization.choose import choose_schemes
from penstock.quantization.quant_config import parse_quantization
from penstock.weights.load import load_weights
from penstock.weights.quantized import gathered
from penstock.weights.stream import stream

CPU = torch.device("cpu")
FUSED = {  # of a decoder block: our layers, the modules that they are made of
    "attention.qkv_proj": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "attention.o_proj": ["self_attn.o_proj"],
    "mlp.gate_up_proj": ["mlp.gate_proj", "mlp.up_proj"],
    "mlp.down_proj": ["mlp.down_proj"],
}
OUTPUTS, INPUTS, GROUP = 96, 256, 128


@pytest.fixture
def weight() -> Tensor:
    return torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(1)) / INPUTS**0.5


def read(folder: Path, settings: dict, tensors: dict[str, Tensor]) -> QuantizedWeight:
    """What we find in a file with these tensors of one module."""
    save_file({f"m.{k}": v.contiguous() for k, v in tensors.items()}, folder / "w.safetensors")
    spec = parse_quantization(json.loads(json.dumps(settings)))
    assert spec is not None and spec.weight_only is not None
    (found,) = gathered(stream((folder / "w.safetensors",)), spec.weight_only)
    assert found.name == "m.weight" and found.shape == (OUTPUTS, INPUTS)
    coded = found.read_quantized((slice(None), slice(None)), CPU)
    assert coded is not None
    assert torch.equal(found.read((slice(None), slice(None))), coded.values())
    return coded


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("strategy", ["group", "channel"])
def test_compressed_tensors_packed(tmp_path, weight, bits, symmetric, strategy):
    library = pytest.importorskip("compressed_tensors.compressors.pack_quantized.base")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    helpers = pytest.importorskip("compressed_tensors.quantization.utils.helpers")
    weights = {
        "num_bits": bits,
        "type": "int",
        "strategy": strategy,
        "symmetric": symmetric,
        "group_size": GROUP if strategy == "group" else None,
    }
    args = quantization.QuantizationArgs(**weights)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=args)
    weight = weight.bfloat16()
    groups = weight.unflatten(1, (-1, GROUP if strategy == "group" else INPUTS))
    scale, zero = helpers.calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    state = {"weight": weight, "weight_scale": scale.bfloat16(), "weight_zero_point": zero}
    packed = library.PackedQuantizationCompressor.compress(state, scheme)
    settings = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    coded = read(tmp_path, settings, packed)
    theirs = library.PackedQuantizationCompressor.decompress(packed, scheme)["weight"]
    assert torch.equal(coded.values().to(theirs.dtype), theirs)
    assert (coded.values() - weight).abs().mean() < (0.15 if bits == 4 else 0.01) * weight.std()


def test_compressed_tensors_nvfp4(tmp_path, weight):
    library = pytest.importorskip("compressed_tensors.compressors.nvfp4.base")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    weights = {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "symmetric": True,
        "group_size": 16,
    }
    args = quantization.QuantizationArgs(**weights)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=args)
    outer = (448 * 6 / weight.abs().amax()).view(1)
    scale = (weight.unflatten(1, (-1, 16)).abs().amax(-1) / 6 * outer).to(torch.float8_e4m3fn)
    state = {
        "weight": weight.bfloat16(),
        "weight_scale": scale.bfloat16(),
        "weight_global_scale": outer,
    }
    packed = library.NVFP4PackedCompressor.compress(state, scheme)
    assert packed["weight_scale"].dtype == torch.float8_e4m3fn
    settings = {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    coded = read(tmp_path, settings, packed)
    theirs = library.NVFP4PackedCompressor.decompress(packed, scheme)["weight"]
    assert theirs.dtype == torch.bfloat16
    assert torch.equal(coded.values().bfloat16(), theirs)
    assert (coded.values() - weight).abs().mean() < 0.15 * weight.std()


def test_modelopt_nvfp4(tmp_path, weight):
    library = pytest.importorskip("modelopt.torch.quantization.qtensor")
    packed, scale, outer = library.NVFP4QTensor.quantize(weight, 16)
    tensors = {
        "weight": packed._quantized_data,
        "weight_scale": scale,
        "weight_scale_2": outer,
        "input_scale": torch.tensor(0.01),
    }
    settings = {"quant_algo": "NVFP4", "group_size": 16}
    coded = read(tmp_path, settings, tensors)
    theirs = packed.dequantize(torch.float32, scale=scale, double_scale=outer, block_sizes={-1: 16})
    assert torch.equal(coded.values(), theirs)
    assert (theirs - weight).abs().mean() < 0.15 * weight.std()


# A matrix -> what a library packs it to, by the end of its name, and what it reads back.
Pack = Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]


def check_loaded(folder: Path, settings: dict, pack: Pack) -> None:
    """A model whose matrices a library has packed, loaded here: the numbers that it reads back."""
    make_checkpoint(folder, "llama")
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"quantization_config": settings}))
    tensors, theirs = load_file(folder / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        module = name.removesuffix(".weight")
        packed, theirs[module] = pack(tensors.pop(name))
        tensors |= {f"{module}.{end}": tensor.contiguous() for end, tensor in packed.items()}
    save_file(tensors, folder / "model.safetensors")
    spec, mesh = parse_model_spec(folder), RankMesh.single()
    schemes = choose_schemes(spec.quantization, folder, torch.float32, CPU)
    model = build_model(spec, mesh, torch.float32, CPU, get_backend("reference"), schemes)
    load_weights(model, folder, spec, mesh, progress=False)
    model.finish()
    for number, block in enumerate(model.layers):
        for layer, parts in FUSED.items():
            expected = torch.cat([theirs[f"model.layers.{number}.{part}"] for part in parts])
            found = block.get_submodule(layer).values()
            assert torch.equal(found.to(expected.dtype), expected), (number, layer)


@pytest.mark.parametrize("strategy", ["channel", "tensor"])
@pytest.mark.parametrize(
    ("numbers", "inputs"),
    [("float", "token"), ("float", "tensor"), ("float", None), ("int", "token"), ("int", "tensor")],
)
def test_compressed_tensors_of_eight_bits(tmp_path, numbers, strategy, inputs):
    library = pytest.importorskip("compressed_tensors.compressors.naive_quantized.base")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    helpers = pytest.importorskip("compressed_tensors.quantization.utils.helpers")
    number = {"num_bits": 8, "type": numbers, "symmetric": True}
    weights = number | {"strategy": strategy}
    activations = None
    if inputs is not None:
        activations = number | {"strategy": inputs, "dynamic": inputs == "token"}
    args = quantization.QuantizationArgs(**weights)
    scheme = quantization.QuantizationScheme(
        targets=["Linear"],
        weights=args,
        input_activations=activations and quantization.QuantizationArgs(**activations),
    )
    compressor = (
        library.FloatQuantizationCompressor
        if numbers == "float"
        else library.IntQuantizationCompressor
    )

    def pack(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        rows = weight if strategy == "channel" else weight.view(1, -1)
        scale, _ = helpers.calculate_qparams(
            rows.amin(1, keepdim=True), rows.amax(1, keepdim=True), args
        )
        scale = scale if strategy == "channel" else scale.view(1)
        packed = compressor.compress({"weight": weight, "weight_scale": scale}, scheme)
        theirs = compressor.decompress(packed, scheme)["weight"]
        assert packed["weight"].dtype.itemsize == 1 and theirs.dtype == torch.float32
        assert (theirs - weight).abs().mean() < 0.03 * weight.std()
        static = {"input_scale": torch.tensor([0.01])} if inputs == "tensor" else {}
        return packed | static, theirs

    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    settings = {
        "quant_method": "compressed-tensors",
        "format": f"{numbers}-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    check_loaded(tmp_path, settings, pack)


@pytest.mark.parametrize("algorithm", ["FP8", "FP8_PER_CHANNEL_PER_TOKEN"])
def test_modelopt_fp8(tmp_path, algorithm):
    """As its export stores matrices, and as its own tensors read them back."""
    library = pytest.importorskip("modelopt.torch.quantization.qtensor")
    export = pytest.importorskip("modelopt.torch.export.quant_utils")
    is_by_channel = algorithm != "FP8"

    def pack(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        made, scale = library.FP8QTensor.quantize(weight, axis=0 if is_by_channel else None)
        theirs = made.dequantize(torch.float32, scale=scale)
        scale = scale.flatten() if is_by_channel else scale.squeeze()
        name = export.QUANTIZATION_FP8_PC_PT if is_by_channel else export.QUANTIZATION_FP8
        stored = export.to_quantized_weight(weight, scale, name)
        assert stored.dtype == torch.float8_e4m3fn
        assert (theirs - weight).abs().mean() < 0.03 * weight.std()
        static = {} if is_by_channel else {"input_scale": torch.tensor(0.01)}
        return {"weight": stored, "weight_scale": scale} | static, theirs

    settings = {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"]}
    check_loaded(tmp_path, settings, pack)


def test_fp8_blocks_of_transformers(weight):
    library = pytest.importorskip("transformers.integrations.finegrained_fp8")
    scale = torch.rand(1, 2) / 448
    values = (weight / scale.repeat_interleave(128, 1)).to(torch.float8_e4m3fn)
    theirs = library.Fp8Dequantize(None)._dequantize_one(values, scale, torch.float32)
    assert torch.equal(dequantized(values, scale), theirs)


def test_compressed_tensors_mxfp4(tmp_path, weight):
    library = pytest.importorskip("compressed_tensors.compressors.mxfp4.base")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
    args = quantization.QuantizationArgs(**weights, symmetric=True, scale_dtype=torch.uint8)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=args)
    scale = (weight.unflatten(1, (-1, 32)).abs().amax(-1).log2().floor() - 2).exp2()
    state = {"weight": weight.bfloat16(), "weight_scale": scale.bfloat16()}
    packed = library.MXFP4PackedCompressor.compress(state, scheme)
    settings = {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    coded = read(tmp_path, settings, packed)
    theirs = library.MXFP4PackedCompressor.decompress(packed, scheme)["weight"]
    assert theirs.dtype == torch.bfloat16
    assert torch.equal(coded.values(), theirs.float())


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bitsandbytes_nf4(tmp_path, weight, nested, dtype):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    layer = bitsandbytes.nn.Linear4bit(
        INPUTS,
        OUTPUTS,
        bias=False,
        compute_dtype=dtype,
        compress_statistics=nested,
        quant_type="nf4",
    )
    layer.weight = bitsandbytes.nn.Params4bit(
        weight.to(dtype), requires_grad=False, quant_type="nf4", compress_statistics=nested
    )
    layer = layer.to("cpu")
    if layer.weight.dtype != torch.uint8:
        layer.weight = layer.weight._quantize(CPU)
    tensors = {k: v for k, v in layer.state_dict().items() if isinstance(v, Tensor)}
    settings = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
    }
    coded = read(tmp_path, settings, tensors)
    theirs = bitsandbytes.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    assert theirs.dtype == dtype and ("weight.nested_absmax" in tensors) == nested
    assert torch.equal(coded.values().to(dtype), theirs)
    if not nested:  # what is made while loading is what they make
        ours = quantize_nf4(weight.to(dtype))
        assert torch.equal(ours.scales_OG, coded.scales_OG)
        assert torch.equal(ours.codes_OI, coded.codes_OI)


def test_bitsandbytes_int8(tmp_path, weight):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    codes, scales, _ = bitsandbytes.functional.int8_vectorwise_quant(weight.half())
    tensors = {
        "weight": codes,
        "SCB": scales.float(),
        "weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    coded = read(tmp_path, {"quant_method": "bitsandbytes", "load_in_8bit": True}, tensors)
    theirs = bitsandbytes.functional.int8_vectorwise_dequant(codes, scales)
    assert torch.equal(coded.values().half(), theirs.half())
    assert torch.allclose(coded.values(), theirs, rtol=2e-7, atol=0)


def test_autoawq(tmp_path, weight):
    """Their packing, and their own way back."""
    gemm = pytest.importorskip("awq.modules.linear.gemm")
    packing = pytest.importorskip("awq.utils.packing_utils")
    groups = weight.unflatten(1, (-1, GROUP))
    low, high = groups.amin(-1), groups.amax(-1)
    scales = ((high - low) / 15).half().float()
    zeros = (-low / scales).round().clamp(0, 15)
    rounded = (groups / scales[..., None] + zeros[..., None]).round().clamp(0, 15)
    layer = nn.Linear(INPUTS, OUTPUTS, bias=False)
    layer.weight.data = ((rounded - zeros[..., None]) * scales[..., None]).flatten(1)
    packed = gemm.WQLinear_GEMM.from_linear(
        layer, 4, GROUP, scales=scales.t().contiguous(), zeros=zeros.t().contiguous()
    )
    tensors = {k: getattr(packed, k) for k in ("qweight", "qzeros", "scales")}
    settings = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}
    coded = read(tmp_path, settings, tensors)
    theirs = packing.dequantize_gemm(packed.qweight, packed.qzeros, packed.scales, 4, GROUP)
    assert theirs.dtype == torch.float16
    assert torch.equal(coded.values().half(), theirs.t())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_gptq_by_auto_round(tmp_path, weight, bits, version):
    name = "qlinear_torch_zp" if version == "gptq" else "qlinear_torch"
    library = pytest.importorskip(f"auto_round_extension.torch.{name}")
    groups, top = weight.unflatten(1, (-1, GROUP)), 2**bits - 1
    low, high = groups.amin(-1), groups.amax(-1)
    scales = ((high - low) / top).half().float()
    zeros = (-low / scales).round().clamp(1, top)
    layer = nn.Linear(INPUTS, OUTPUTS, bias=False)
    codes = (groups / scales[..., None] + zeros[..., None]).round().clamp(0, top)
    layer.weight.data = ((codes - zeros[..., None]) * scales[..., None]).flatten(1)
    packed = library.QuantLinear(bits, GROUP, INPUTS, OUTPUTS, bias=False)
    packed.device = "cpu"
    packed.pack(layer, scales, zeros, None, "cpu")
    tensors = {k: getattr(packed, k) for k in ("qweight", "qzeros", "scales")}
    settings = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": GROUP,
        "sym": False,
        "checkpoint_format": version,
    }
    coded = read(tmp_path, settings, tensors)
    with torch.inference_mode():
        theirs = packed(torch.eye(INPUTS).half())
    assert torch.equal(coded.values().half(), theirs.t().half())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_gptq_with_act_order_by_gptqmodel(tmp_path, weight, bits, version):
    """Inputs in groups by the size of what they are given, not by their numbers."""
    library = pytest.importorskip("gptqmodel.nn_modules.qlinear.torch")
    model = pytest.importorskip("gptqmodel.utils.model")
    order = torch.randperm(INPUTS, generator=torch.Generator().manual_seed(2))
    g_idx = torch.empty(INPUTS, dtype=torch.int32)
    g_idx[order] = torch.arange(INPUTS, dtype=torch.int32) // GROUP
    groups, top = weight[:, order].unflatten(1, (-1, GROUP)), 2**bits - 1
    low, high = groups.amin(-1), groups.amax(-1)
    scales = ((high - low) / top).half().float()
    zeros = (-low / scales).round().clamp(1, top)
    packed = library.TorchLinear(
        bits=bits, group_size=GROUP, sym=False, desc_act=True, in_features=INPUTS,
        out_features=OUTPUTS, bias=False,
    )  # fmt: skip
    layer = nn.Linear(INPUTS, OUTPUTS, bias=False)
    layer.weight.data = weight
    packed.pack_original(layer, scales, zeros, g_idx)
    theirs = packed.dequantize_weight().t()
    if version == "gptq":
        model.convert_gptq_v2_to_v1_format_module(packed, packed)
    tensors = {k: getattr(packed, k) for k in ("qweight", "qzeros", "scales", "g_idx")}
    settings = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": GROUP,
        "desc_act": True,
        "sym": False,
        "checkpoint_format": version,
    }
    coded = read(tmp_path, settings, tensors)
    assert coded.order_I is not None and theirs.dtype == torch.float16
    assert torch.equal(coded.values().half(), theirs)
    assert (theirs - weight).abs().mean() < (0.15 if bits == 4 else 0.01) * weight.std()
