"""Matrices packed by the libraries that define the layouts: read here, equal bit for bit.

Each test needs its library and is skipped without it.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from penstock.kernels.coded import Coded, nf4_coded
from penstock.kernels.fp8 import weight_values
from penstock.quant.parse import parse_quantization
from penstock.weights.coded import gathered
from penstock.weights.stream import stream

CPU = torch.device("cpu")
OUTPUTS, INPUTS, GROUP = 96, 256, 128


@pytest.fixture
def weight() -> Tensor:
    return torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(1)) / INPUTS**0.5


def read(folder: Path, settings: dict, tensors: dict[str, Tensor]) -> Coded:
    """What we find in a file with these tensors of one module."""
    save_file({f"m.{k}": v.contiguous() for k, v in tensors.items()}, folder / "w.safetensors")
    spec = parse_quantization(json.loads(json.dumps(settings)))
    assert spec is not None and spec.codes is not None
    (found,) = gathered(stream((folder / "w.safetensors",)), spec.codes)
    assert found.name == "m.weight" and found.shape == (OUTPUTS, INPUTS)
    coded = found.read_coded((slice(None), slice(None)), CPU)
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


def test_modelopt_fp8(weight):
    library = pytest.importorskip("modelopt.torch.quantization.qtensor")
    packed, scale = library.FP8QTensor.quantize(weight)
    assert packed._quantized_data.dtype == torch.float8_e4m3fn
    theirs = packed.dequantize(torch.float32, scale=scale)
    assert torch.equal(weight_values(packed._quantized_data, scale.view(1)), theirs)


def test_fp8_blocks_of_transformers(weight):
    library = pytest.importorskip("transformers.integrations.finegrained_fp8")
    scale = torch.rand(1, 2) / 448
    values = (weight / scale.repeat_interleave(128, 1)).to(torch.float8_e4m3fn)
    theirs = library.Fp8Dequantize(None)._dequantize_one(values, scale, torch.float32)
    assert torch.equal(weight_values(values, scale), theirs)


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
        ours = nf4_coded(weight.to(dtype))
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
