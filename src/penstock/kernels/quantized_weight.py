"""`QuantizedWeight`: a low-bit weight matrix as a checkpoint has it, exact and in logical order.

It says what a weight is, not how a kernel reads it: `gemm/wna16_packing.py` packs it for a GPU,
`gemm/quantized_cpu.py` for a CPU.

A weight is number(code) times its group's scale, and where there is one times its output's. INT4
and INT8 are codes less a zero point; NF4 is a table of 16 quantiles of the normal distribution, FP4
is E2M1, E4M3 is FP8. "affine" is what GGUF stores: scale * code + minimum.

Legend: O outputs, I inputs, G groups of inputs.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["int4", "int8", "nf4", "fp4", "e4m3", "affine"]

FP4_GROUP = 16
NF4_GROUP = 64
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # with the highest bit, negative
NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
EIGHT_BIT_KINDS: tuple[Kind, ...] = ("int8", "e4m3")
ZERO_POINTS = {"int4": 8, "int8": 128}  # of symmetric quantization
_DOUBLED_FP4 = (0, 1, 2, 3, 4, 6, 8, 12)


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    kind: Kind
    codes_OI: Tensor  # uint8; affine: int8
    scales_OG: Tensor  # floats
    zeros_OG: Tensor | None = None  # uint8, of INT4 and INT8; None: symmetric
    outer_O: Tensor | None = None  # fp32: a second scale, per output
    order_I: Tensor | None = None  # int64: the input that each column is for (GPTQ's act-order)
    minima_OG: Tensor | None = None  # fp32, of affine alone
    input_scale: Tensor | None = None  # fp32: of activations that are meant to be quantized, too

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.codes_OI.shape[1] // self.scales_OG.shape[1]

    def values(self) -> Tensor:
        """The matrix [O, I] in fp32, its inputs in their own order."""
        scales_OG = self._scales()
        zeros_OI = None if self.zeros_OG is None else self._by_input(self.zeros_OG)
        values_OI = numbers(self.kind, self.codes_OI, zeros_OI) * self._by_input(scales_OG)
        if self.minima_OG is not None:
            values_OI = values_OI + self._by_input(self.minima_OG)
        return values_OI if self.order_I is None else values_OI[:, self.order_I.argsort()]

    def rows(self, rows_R: Tensor) -> "QuantizedWeight":
        """Some outputs, in this order."""
        by_row = ("codes_OI", "scales_OG", "zeros_OG", "outer_O", "minima_OG")
        found = {name: getattr(self, name) for name in by_row}
        return replace(self, **{n: x[rows_R] for n, x in found.items() if x is not None})

    def as_affine(self) -> "QuantizedWeight | None":
        """The same weight as scale * code + minimum; None where its numbers are no such sums."""
        if self.kind == "affine":
            return self
        if self.kind in ("nf4", "e4m3") or self.order_I is not None:
            return None
        scales_OG = self._scales()
        if self.kind == "fp4":  # E2M1 counts in halves: twice its values are integers
            doubled = torch.tensor(_DOUBLED_FP4, dtype=torch.int8)
            codes_OI = torch.cat((doubled, -doubled))[self.codes_OI.int()]
            return _affine(codes_OI, scales_OG / 2, torch.zeros_like(scales_OG))
        if self.kind == "int8":
            codes_OI, shift = (self.codes_OI ^ 128).view(torch.int8), 128
        else:
            codes_OI, shift = self.codes_OI.view(torch.int8), 0
        zeros_OG = torch.full_like(scales_OG, ZERO_POINTS[self.kind])
        if self.zeros_OG is not None:
            zeros_OG = self.zeros_OG.float()
        return _affine(codes_OI, scales_OG, -scales_OG * (zeros_OG - shift))

    def _scales(self) -> Tensor:
        scales_OG = self.scales_OG.float()
        return scales_OG if self.outer_O is None else scales_OG * self.outer_O[:, None]

    def _by_input(self, x_OG: Tensor) -> Tensor:
        return x_OG.repeat_interleave(self.group, dim=1)


def _affine(codes_OI: Tensor, scales_OG: Tensor, minima_OG: Tensor) -> QuantizedWeight:
    return QuantizedWeight("affine", codes_OI, scales_OG, minima_OG=minima_OG)


def numbers(kind: Kind, codes: Tensor, zeros: Tensor | None) -> Tensor:
    """What codes stand for, in fp32."""
    if kind == "e4m3":
        return codes.view(torch.float8_e4m3fn).float()
    if kind == "affine":
        return codes.float()
    if kind in ZERO_POINTS:
        return codes.float() - (ZERO_POINTS[kind] if zeros is None else zeros.float())
    values = NF4_VALUES if kind == "nf4" else (*FP4_VALUES, *(-v for v in FP4_VALUES))
    return torch.tensor(values, device=codes.device)[codes.int()]


def quantize_nf4(weight_OI: Tensor) -> QuantizedWeight | None:
    """Round to the nearest of each group's 16 values; None where inputs are no whole groups."""
    if weight_OI.shape[1] % NF4_GROUP:
        return None
    groups_OGI = weight_OI.float().unflatten(1, (-1, NF4_GROUP))
    scales_OG = groups_OGI.abs().amax(-1)
    values = torch.tensor(NF4_VALUES, device=weight_OI.device)
    scaled_OGI = groups_OGI / scales_OG.clamp(min=1e-30).unsqueeze(-1)
    codes_OGI = torch.bucketize(scaled_OGI, (values[1:] + values[:-1]) / 2)
    return QuantizedWeight("nf4", codes_OGI.flatten(1).to(torch.uint8), scales_OG)


def quantize_int8_weight(weight_OI: Tensor) -> QuantizedWeight:
    """Symmetric INT8 with a scale per output."""
    scales_O1 = weight_OI.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
    codes_OI = (weight_OI / scales_O1).round() + ZERO_POINTS["int8"]
    return QuantizedWeight("int8", codes_OI.to(torch.uint8), scales_O1)


def random_quantized(
    kind: Kind,
    out_features: int,
    in_features: int,
    group: int,
    has_zeros: bool,
    device: torch.device,
) -> QuantizedWeight:
    """Uniform random codes, scaled so that a GEMM keeps the size of its inputs."""
    spread = {"int4": 4.6, "int8": 74.0, "nf4": 0.55, "fp4": 2.93, "e4m3": 0.6}[kind]
    highest = 256 if kind in EIGHT_BIT_KINDS else 16
    codes_OI = torch.empty((out_features, in_features), dtype=torch.uint8, device=device)
    codes_OI.random_(0, highest, generator=torch.Generator(device).manual_seed(out_features))
    if kind == "e4m3":
        codes_OI &= 0b10111111  # below two, and none that is no number
    num_groups = in_features // group
    scale = 1 / (spread * in_features**0.5)
    if kind == "fp4":
        ones = torch.ones((out_features, num_groups), device=device).to(torch.float8_e4m3fn)
        outer_O = torch.full((out_features,), scale, device=device)
        return QuantizedWeight(kind, codes_OI, ones, outer_O=outer_O)
    dtype = torch.float32 if kind == "nf4" else torch.bfloat16
    scales_OG = torch.full((out_features, num_groups), scale, dtype=dtype, device=device)
    zeros_OG = None
    if has_zeros:
        zeros_OG = torch.full_like(scales_OG, ZERO_POINTS[kind], dtype=torch.uint8)
    return QuantizedWeight(kind, codes_OI, scales_OG, zeros_OG)
