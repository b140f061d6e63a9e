"""One matrix in the public layout of each format: its tensors, and the numbers they stand for.

`fp8`, `int8_sq`, `nvfp4` and `mxfp4` are written as compressed-tensors does, `awq` as AutoAWQ
(gemm), `gptq` as GPTQ's first version. A `Grid` is what numbers a matrix may have, once its scales
are found; which of them a weight becomes, other than the nearest, is decided elsewhere
(`search.py`).

Legend: O outputs, I inputs, G groups of inputs.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from penstock.kernels.moe import MXFP4_GROUP
from penstock.kernels.quantize import FP8_MAX, INT8_MAX
from penstock.kernels.quantized_weight import FP4_GROUP, FP4_VALUES

Format = Literal["fp8", "int8_sq", "nvfp4", "mxfp4", "awq", "gptq"]
FORMATS: tuple[Format, ...] = ("fp8", "int8_sq", "nvfp4", "mxfp4", "awq", "gptq")
MOVING: tuple[Format, ...] = ("int8_sq", "awq")  # sizes of inputs go into weights first
GROUPS = (128, 32)  # of awq and gptq, the first that divides every layer's inputs
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output of each place in a word
_PARTS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)  # of a group's range that codes may cover
_SHIFTS = tuple(2 ** (step / 8) for step in range(8))  # of a scale, within an octave
_TINY = 1e-12
_LARGEST_FP4 = FP4_VALUES[-1]


@dataclass(frozen=True, slots=True, eq=False)
class Quantized:
    tensors: dict[str, Tensor]  # by the end of their names
    values_OI: Tensor  # fp32


class Grid(Protocol):
    def column(self, w_O1: Tensor, number: int) -> Tensor:
        """The nearest numbers for what shall be column `number`."""
        ...

    def packed(self, weight_OI: Tensor) -> Quantized:
        """The nearest numbers for a whole matrix."""
        ...


def grid_of(weight_OI: Tensor, format: Format, group: int, square_I: Tensor | None = None) -> Grid:
    """`square_I` is the mean square of each input; None: all are alike. A group (`fp8`: an output)
    has the scale with which least is lost."""
    if square_I is None:
        square_I = weight_OI.new_ones(weight_OI.shape[1])
    match format:
        case "fp8":
            return _fp8(weight_OI, square_I)
        case "int8_sq":
            return _Output(_whole_scale(weight_OI, INT8_MAX), is_float=False)
        case "nvfp4":
            return _nvfp4(weight_OI, square_I)
        case "mxfp4":
            return _mxfp4(weight_OI, square_I)
        case "awq":
            return _asymmetric(weight_OI, square_I, group)
        case "gptq":
            return _symmetric(weight_OI, square_I, group)


@dataclass(frozen=True, slots=True, eq=False)
class _Output:
    """FP8 or INT8 with a scale per output."""

    scale_O1: Tensor
    is_float: bool

    def column(self, w_O1: Tensor, number: int) -> Tensor:
        return self._stored(w_O1).float() * self.scale_O1

    def packed(self, weight_OI: Tensor) -> Quantized:
        stored_OI = self._stored(weight_OI)
        tensors = {"weight": stored_OI, "weight_scale": self.scale_O1}
        return Quantized(tensors, stored_OI.float() * self.scale_O1)

    def _stored(self, weight_OI: Tensor) -> Tensor:
        if self.is_float:
            return _e4m3(weight_OI, self.scale_O1)
        scaled_OI = weight_OI / self.scale_O1
        return scaled_OI.round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8)


def _fp8(weight_OI: Tensor, square_I: Tensor) -> _Output:
    """Steps of floats are alike in all octaves, so what counts is where within one a scale lies.
    None of these cuts a weight."""
    whole_O1 = _whole_scale(weight_OI, FP8_MAX)
    ways = ((whole_O1 * shift,) for shift in _SHIFTS)
    (scale_O1,) = _best(weight_OI, square_I, ways, _e4m3_values)
    return _Output(scale_O1, is_float=True)


def _whole_scale(weight_OI: Tensor, largest: float) -> Tensor:
    """With which numbers up to `largest` cover an output's whole range."""
    return weight_OI.abs().amax(1, keepdim=True).clamp(min=_TINY) / largest


def _e4m3(weight_OI: Tensor, scale_O1: Tensor) -> Tensor:
    return (weight_OI / scale_O1).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def _e4m3_values(weight_OI: Tensor, scale_O1: Tensor) -> Tensor:
    return _e4m3(weight_OI, scale_O1).float() * scale_O1


def _nvfp4(weight_OI: Tensor, square_I: Tensor) -> "_Floats":
    outer = FP8_MAX * _LARGEST_FP4 / weight_OI.abs().amax().clamp(min=_TINY)  # a divisor
    largest_OG = weight_OI.unflatten(1, (-1, FP4_GROUP)).abs().amax(-1)
    inner_OG = largest_OG / _LARGEST_FP4 * outer
    ways = (((inner_OG * part).to(torch.float8_e4m3fn).float() / outer,) for part in _PARTS)
    (scales_OG,) = _best(weight_OI, square_I, ways, _fp4_values)
    stored_OG = (scales_OG * outer).to(torch.float8_e4m3fn)
    tensors = {"weight_scale": stored_OG, "weight_global_scale": outer.view(1)}
    return _Floats(stored_OG.float() / outer, FP4_GROUP, tensors)


def _mxfp4(weight_OI: Tensor, square_I: Tensor) -> "_Floats":
    """Of the two powers of two that a group's largest weight asks for the smaller one cuts it."""
    largest_OG = weight_OI.unflatten(1, (-1, MXFP4_GROUP)).abs().amax(-1)
    power_OG = (largest_OG.clamp(min=_TINY).log2().floor() - 2).clamp(min=-127)
    ways = ((power_OG.exp2(),), ((power_OG + 1).exp2(),))
    (scales_OG,) = _best(weight_OI, square_I, ways, _fp4_values)
    stored_OG = (scales_OG.log2().round() + 127).to(torch.uint8)
    return _Floats(scales_OG, MXFP4_GROUP, {"weight_scale": stored_OG})


@dataclass(frozen=True, slots=True, eq=False)
class _Floats:
    """FP4 with group scales. `tensors`: how these are stored."""

    scales_OG: Tensor  # fp32
    group: int
    tensors: dict[str, Tensor]

    def column(self, w_O1: Tensor, number: int) -> Tensor:
        at = number // self.group
        return _fp4_values(w_O1, self.scales_OG[:, at : at + 1])

    def packed(self, weight_OI: Tensor) -> Quantized:
        codes_OI = _fp4(weight_OI, self.scales_OG)
        packed = codes_OI[:, ::2] | codes_OI[:, 1::2] << 4
        values_OI = _fp4_values(weight_OI, self.scales_OG)
        return Quantized({"weight_packed": packed} | self.tensors, values_OI)


def _fp4(weight_OI: Tensor, scales_OG: Tensor) -> Tensor:
    """Codes of the nearest numbers: three bits of the size, one of the sign."""
    groups_OGI = weight_OI.unflatten(1, (scales_OG.shape[1], -1))
    scaled_OGI = groups_OGI / scales_OG.clamp(min=_TINY).unsqueeze(-1)
    sizes = torch.tensor(FP4_VALUES, device=weight_OI.device)
    codes_OGI = torch.bucketize(scaled_OGI.abs(), (sizes[1:] + sizes[:-1]) / 2)
    return (codes_OGI + 8 * (scaled_OGI < 0)).flatten(1).to(torch.uint8)


def _fp4_values(weight_OI: Tensor, scales_OG: Tensor) -> Tensor:
    codes_OI = _fp4(weight_OI, scales_OG)
    sizes = torch.tensor(FP4_VALUES, device=weight_OI.device)
    values_OI = sizes[(codes_OI & 7).long()] * torch.where(codes_OI < 8, 1.0, -1.0)
    return (values_OI.unflatten(1, (scales_OG.shape[1], -1)) * scales_OG.unsqueeze(-1)).flatten(1)


def _asymmetric(weight_OI: Tensor, square_I: Tensor, group: int) -> "_Codes":
    ways = (_covering(weight_OI, group, part) for part in _PARTS)
    scales_OG, zeros_OG = _best(weight_OI, square_I, ways, _code_values)
    return _Codes(scales_OG, zeros_OG, group, is_awq=True)


def whole_range(weight_OI: Tensor, group: int) -> Grid:
    """Of `awq`, whose largest weights are never cut: quickly found, for a search."""
    return _Codes(*_covering(weight_OI, group, 1.0), group, is_awq=True)


def _covering(weight_OI: Tensor, group: int, part: float) -> tuple[Tensor, Tensor]:
    """(scales, zero points) of codes that cover so much of each group's range."""
    groups_OGI = weight_OI.unflatten(1, (-1, group))
    low_OG = groups_OGI.amin(-1).clamp(max=0) * part
    high_OG = groups_OGI.amax(-1).clamp(min=0) * part
    scales_OG = ((high_OG - low_OG) / 15).clamp(min=1e-5).half()
    return scales_OG, (-low_OG / scales_OG.float()).round().clamp(0, 15)


def _symmetric(weight_OI: Tensor, square_I: Tensor, group: int) -> "_Codes":
    largest_OG = weight_OI.unflatten(1, (-1, group)).abs().amax(-1)
    middle_OG = torch.full_like(largest_OG, 8)
    ways = (((largest_OG * (part / 7)).clamp(min=1e-5).half(), middle_OG) for part in _PARTS)
    scales_OG, zeros_OG = _best(weight_OI, square_I, ways, _code_values)
    return _Codes(scales_OG, zeros_OG, group, is_awq=False)


@dataclass(frozen=True, slots=True, eq=False)
class _Codes:
    """(0 to 15, less a zero point) times a scale of the group."""

    scales_OG: Tensor  # fp16
    zeros_OG: Tensor
    group: int
    is_awq: bool  # else as GPTQ stores them

    def column(self, w_O1: Tensor, number: int) -> Tensor:
        at = slice(number // self.group, number // self.group + 1)
        return _code_values(w_O1, self.scales_OG[:, at], self.zeros_OG[:, at])

    def packed(self, weight_OI: Tensor) -> Quantized:
        codes_OI = _codes(weight_OI, self.scales_OG, self.zeros_OG)
        if self.is_awq:
            tensors = {
                "qweight": _words(codes_OI.t(), _AWQ_ORDER),
                "qzeros": _words(self.zeros_OG.t(), _AWQ_ORDER),
            }
        else:
            tensors = {
                "qweight": _words(codes_OI).t(),
                "qzeros": _words(self.zeros_OG.t() - 1),  # this layout stores one less
                "g_idx": (torch.arange(weight_OI.shape[1]) // self.group).int(),
            }
        values_OI = _code_values(weight_OI, self.scales_OG, self.zeros_OG)
        return Quantized(tensors | {"scales": self.scales_OG.t()}, values_OI)


def _codes(weight_OI: Tensor, scales_OG: Tensor, zeros_OG: Tensor) -> Tensor:
    groups_OGI = weight_OI.unflatten(1, (scales_OG.shape[1], -1))
    codes_OGI = groups_OGI / scales_OG.float().unsqueeze(-1) + zeros_OG.unsqueeze(-1)
    return codes_OGI.round().clamp(0, 15).flatten(1)


def _code_values(weight_OI: Tensor, scales_OG: Tensor, zeros_OG: Tensor) -> Tensor:
    codes_OI = _codes(weight_OI, scales_OG, zeros_OG)
    groups_OGI = codes_OI.unflatten(1, (scales_OG.shape[1], -1)) - zeros_OG.unsqueeze(-1)
    return (groups_OGI * scales_OG.float().unsqueeze(-1)).flatten(1)


def _best(
    weight_OI: Tensor,
    square_I: Tensor,
    ways: Iterable[tuple[Tensor, ...]],
    values: Callable[..., Tensor],
) -> tuple[Tensor, ...]:
    """Of each group the scale (and zero point) with which its outputs lose least."""
    found: tuple[Tensor, ...] = ()
    for way in ways:
        lost_OI = (values(weight_OI, *way) - weight_OI).square() * square_I
        lost_OG = lost_OI.unflatten(1, (way[0].shape[1], -1)).sum(-1)
        new = (*way, lost_OG)
        if found:
            is_less_OG = lost_OG < found[-1]
            new = tuple(torch.where(is_less_OG, a, b) for a, b in zip(new, found, strict=True))
        found = new
    return found[:-1]


def _words(codes: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """int32 words of eight codes along the last dimension."""
    parts = codes.long().unflatten(-1, (-1, 8))
    words = sum(parts[..., place] << (4 * at) for at, place in enumerate(order))
    assert isinstance(words, Tensor)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def settings(format: Format, group: int, left: list[str], input_bits: int = 8) -> dict[str, Any]:
    """`quantization_config` of a checkpoint whose modules `left` are not quantized. `input_bits` is
    for `fp8`: 16 leaves the inputs of its layers as they are."""
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
    if format == "fp8" and input_bits == 16:
        inputs = None
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
