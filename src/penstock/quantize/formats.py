"""One matrix in the public layout of each format: its tensors, and the numbers they stand for.

`fp8`, `int8_sq`, `nvfp4` and `mxfp4` are written as compressed-tensors does, `awq` as AutoAWQ
(gemm), `gptq` as GPTQ's first version. Which numbers a matrix becomes beyond the nearest ones is
decided elsewhere (`search.py`); here they are packed.

Legend: O outputs, I inputs, G groups of inputs.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from penstock.kernels.coded.weights import FP4_GROUP, FP4_VALUES
from penstock.kernels.fp8 import LARGEST
from penstock.kernels.int8.reference import LARGEST as LARGEST_INT8
from penstock.kernels.moe import MXFP4_GROUP

Format = Literal["fp8", "int8_sq", "nvfp4", "mxfp4", "awq", "gptq"]
FORMATS: tuple[Format, ...] = ("fp8", "int8_sq", "nvfp4", "mxfp4", "awq", "gptq")
GROUPS = (128, 64, 32)  # of awq and gptq, the first that divides every layer's inputs
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output of each place in a word
_TINY = 1e-12
_LARGEST_FP4 = FP4_VALUES[-1]


@dataclass(frozen=True, slots=True, eq=False)
class Quantized:
    tensors: dict[str, Tensor]  # by the end of their names
    values_OI: Tensor  # fp32


def nearest(weight_OI: Tensor, format: Format, group: int) -> Quantized:
    """Every weight becomes the nearest number that the format has for it."""
    match format:
        case "fp8":
            return _by_output(weight_OI, LARGEST, torch.float8_e4m3fn)
        case "int8_sq":
            return _by_output(weight_OI, LARGEST_INT8, torch.int8)
        case "nvfp4":
            return _nvfp4(weight_OI)
        case "mxfp4":
            return _mxfp4(weight_OI)
        case "awq":
            return pack_awq(*asymmetric(weight_OI, group))
        case "gptq":
            scales_OG = symmetric_scales(weight_OI.unflatten(1, (-1, group)))
            return pack_gptq(symmetric_codes(weight_OI, scales_OG), scales_OG)


def _by_output(weight_OI: Tensor, largest: float, dtype: torch.dtype) -> Quantized:
    scale_O1 = weight_OI.abs().amax(1, keepdim=True).clamp(min=_TINY) / largest
    scaled_OI = weight_OI / scale_O1
    if dtype == torch.int8:
        scaled_OI = scaled_OI.round()
    values_OI = scaled_OI.to(dtype)
    tensors = {"weight": values_OI, "weight_scale": scale_O1}
    return Quantized(tensors, values_OI.float() * scale_O1)


def _nvfp4(weight_OI: Tensor) -> Quantized:
    outer = LARGEST * _LARGEST_FP4 / weight_OI.abs().amax().clamp(min=_TINY)  # a divisor
    groups_OGI = weight_OI.unflatten(1, (-1, FP4_GROUP))
    scales_OG = (groups_OGI.abs().amax(-1) / _LARGEST_FP4 * outer).to(torch.float8_e4m3fn)
    bytes_OB, values_OGI = _fp4(groups_OGI, scales_OG.float() / outer)
    tensors = {
        "weight_packed": bytes_OB,
        "weight_scale": scales_OG,
        "weight_global_scale": outer.view(1),
    }
    return Quantized(tensors, values_OGI.flatten(1))


def _mxfp4(weight_OI: Tensor) -> Quantized:
    """Of the two powers of two that the largest weight of a group asks for, the one that loses
    less: with the smaller one it may be cut."""
    groups_OGI = weight_OI.unflatten(1, (-1, MXFP4_GROUP))
    smaller_OG = groups_OGI.abs().amax(-1).clamp(min=_TINY).log2().floor() - 2
    lost = [
        (_fp4(groups_OGI, powers_OG.exp2())[1] - groups_OGI).square().sum(-1)
        for powers_OG in (smaller_OG, smaller_OG + 1)
    ]
    powers_OG = (smaller_OG + (lost[1] < lost[0])).clamp(min=-127)
    bytes_OB, values_OGI = _fp4(groups_OGI, powers_OG.exp2())
    tensors = {"weight_packed": bytes_OB, "weight_scale": (powers_OG + 127).to(torch.uint8)}
    return Quantized(tensors, values_OGI.flatten(1))


def _fp4(groups_OGI: Tensor, scales_OG: Tensor) -> tuple[Tensor, Tensor]:
    """(bytes of two codes, numbers): the nearest with these scales."""
    scaled_OGI = groups_OGI / scales_OG.clamp(min=_TINY).unsqueeze(-1)
    numbers = torch.tensor(FP4_VALUES, device=groups_OGI.device)
    codes_OGI = torch.bucketize(scaled_OGI.abs(), (numbers[1:] + numbers[:-1]) / 2)
    values_OGI = numbers[codes_OGI] * scaled_OGI.sign() * scales_OG.unsqueeze(-1)
    codes_OI = (codes_OGI + 8 * (scaled_OGI < 0)).flatten(1).to(torch.uint8)
    return codes_OI[:, ::2] | codes_OI[:, 1::2] << 4, values_OGI


def asymmetric(weight_OI: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """(codes [O, I], scales [O, G] in half precision, zero points [O, G]): 0 to 15."""
    groups_OGI = weight_OI.unflatten(1, (-1, group))
    low_OG = groups_OGI.amin(-1).clamp(max=0)
    high_OG = groups_OGI.amax(-1).clamp(min=0)
    scales_OG = ((high_OG - low_OG) / 15).clamp(min=1e-5).half()
    zeros_OG = (-low_OG / scales_OG.float()).round().clamp(0, 15)
    codes = groups_OGI / scales_OG.float().unsqueeze(-1) + zeros_OG.unsqueeze(-1)
    return codes.round().clamp(0, 15).flatten(1), scales_OG, zeros_OG


def pack_awq(codes_OI: Tensor, scales_OG: Tensor, zeros_OG: Tensor) -> Quantized:
    tensors = {
        "qweight": _words(codes_OI.t(), _AWQ_ORDER),
        "qzeros": _words(zeros_OG.t(), _AWQ_ORDER),
        "scales": scales_OG.t(),
    }
    return Quantized(tensors, _values(codes_OI, scales_OG, zeros_OG))


def symmetric_scales(groups_OGI: Tensor) -> Tensor:
    """Of codes 0 to 15 around 8."""
    return (groups_OGI.abs().amax(-1) / 7.5).clamp(min=1e-5).half()


def symmetric_codes(weight_OI: Tensor, scales_OG: Tensor) -> Tensor:
    groups_OGI = weight_OI.unflatten(1, (scales_OG.shape[1], -1))
    codes = (groups_OGI / scales_OG.float().unsqueeze(-1)).round() + 8
    return codes.clamp(0, 15).flatten(1)


def pack_gptq(codes_OI: Tensor, scales_OG: Tensor) -> Quantized:
    zeros_OG = torch.full_like(scales_OG, 8, dtype=torch.float32)
    group = codes_OI.shape[1] // scales_OG.shape[1]
    tensors = {
        "qweight": _words(codes_OI).t(),
        "qzeros": _words(zeros_OG.t() - 1),  # this layout stores one less
        "scales": scales_OG.t(),
        "g_idx": (torch.arange(codes_OI.shape[1]) // group).int(),
    }
    return Quantized(tensors, _values(codes_OI, scales_OG, zeros_OG))


def _values(codes_OI: Tensor, scales_OG: Tensor, zeros_OG: Tensor) -> Tensor:
    groups_OGI = codes_OI.unflatten(1, (scales_OG.shape[1], -1)).float()
    return ((groups_OGI - zeros_OG.unsqueeze(-1)) * scales_OG.float().unsqueeze(-1)).flatten(1)


def _words(codes: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """int32 words of eight codes along the last dimension."""
    parts = codes.long().unflatten(-1, (-1, 8))
    words = sum(parts[..., place] << (4 * at) for at, place in enumerate(order))
    assert isinstance(words, Tensor)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def settings(format: Format, group: int, left: list[str]) -> dict[str, Any]:
    """`quantization_config` of a checkpoint whose modules `left` are not quantised."""
    if format == "awq":
        return {
            "quant_method": "awq",
            "bits": 4,
            "group_size": group,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": left,
        }
    if format == "gptq":
        others = [name for name in left if name != "lm_head"]
        return {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": group,
            "desc_act": False,
            "sym": True,
            "lm_head": False,
            "checkpoint_format": "gptq",
        } | ({"dynamic": {f"-:{name}$": {} for name in others}} if others else {})
    number = {"num_bits": 8, "type": "int", "symmetric": True}
    if format == "fp8":
        number["type"] = "float"
    weights = number | {"strategy": "channel", "dynamic": False}
    inputs: dict[str, Any] | None = number | {"strategy": "token", "dynamic": True}
    name = "float-quantized" if format == "fp8" else "int-quantized"
    if format == "nvfp4":
        name, inputs = "nvfp4-pack-quantized", None
        weights |= {
            "num_bits": 4,
            "type": "float",
            "strategy": "tensor_group",
            "group_size": FP4_GROUP,
        }
    if format == "mxfp4":
        name, inputs = "mxfp4-pack-quantized", None
        weights |= {
            "num_bits": 4,
            "type": "float",
            "strategy": "group",
            "group_size": MXFP4_GROUP,
            "scale_dtype": "torch.uint8",
        }
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        },
        "ignore": left,
    }
