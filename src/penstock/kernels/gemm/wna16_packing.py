"""Matrices of few bits a number: `Coded` is what they are, `CodedWeight` how they lie on a GPU.

A weight is number(code) times its group's scale, and where there is one times its output's. Whole
numbers (`int4`, `int8`) are codes less a zero point; `nf4` is a table of 16 quantiles of the normal
distribution, `fp4` a sign, two bits of exponent and one of mantissa (e2m1), `e4m3` the 8-bit float.

Words of 32 bits hold four pairs of codes; those of 16 words make up 128 inputs of an output (a
tile). Word 4 t + c has inputs 32 j + 8 c + 2 t and the one behind it as its j-th pair: four words
in a row are what one thread of a tensor core's tile must have. Whole numbers have the pair's first
code at bit 4 j of the word's lower half, the second at that of the upper half. fp4 lies as MXFP4
does in `moe.weights`. nf4 has three bits of code n at bit 4 n; the fourth, which chooses between
two tables, is the highest of a byte's upper half for the first four codes, of its lower half for
the others. Codes of 8 bits are two planes, the lower halves of all codes and the upper ones. Inputs
are filled up to whole tiles.

Scales of groups of up to 128 inputs lie by tile, those of larger ones by group. The scales of fp4
are 8-bit floats without a sign; a sign's bit lets them have five bits of exponent here, so that
none of them is subnormal.

Legend: O outputs, I inputs, G groups of inputs, N tiles of 128 inputs, P planes, W words of a tile,
S scales of an output's tile.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.moe.weights import PLACES

Kind = Literal["int4", "int8", "nf4", "fp4", "e4m3"]

TILE = 128
FP4_GROUP = 16
NF4_GROUP = 64
WORDS = 16
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # with the highest bit, negative
NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
_EIGHT_BITS: tuple[Kind, ...] = ("int8", "e4m3")
_MIDDLE = {"int4": 8, "int8": 128}
_SCALE_BIAS = 10  # of the exponents of an fp4's scales, as they lie on a GPU
_SMALLEST_SCALE = 2.0 ** (1 - _SCALE_BIAS)


@dataclass(frozen=True, slots=True, eq=False)
class Coded:
    """A matrix as a checkpoint has it: exact, but not in an order that is quick to read."""

    kind: Kind
    codes_OI: Tensor  # uint8
    scales_OG: Tensor  # floats
    zeros_OG: Tensor | None = None  # uint8, of whole numbers; None: the middle, 8 or 128
    outer_O: Tensor | None = None  # fp32
    order_I: Tensor | None = None  # int64: the input that each column is for; None: its own

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.codes_OI.shape[1] // self.scales_OG.shape[1]

    def values(self) -> Tensor:
        """The matrix [O, I] in fp32, its inputs in their own order."""
        scales_OG = self.scales_OG.float()
        if self.outer_O is not None:
            scales_OG = scales_OG * self.outer_O[:, None]
        zeros_OG = None if self.zeros_OG is None else self.zeros_OG.repeat_interleave(self.group, 1)
        numbers_OI = numbers(self.kind, self.codes_OI, zeros_OG)
        values_OI = numbers_OI * scales_OG.repeat_interleave(self.group, dim=1)
        return values_OI if self.order_I is None else values_OI[:, self.order_I.argsort()]


@dataclass(frozen=True, slots=True, eq=False)
class CodedWeight:
    """A matrix [outputs, inputs] as kernels read it; or one for each of many slots, whose tensors
    have a dimension more, the first."""

    kind: Kind
    words_NOPW: Tensor  # int32
    scales: Tensor  # [N, O, S], or [G, O, 1] of groups larger than a tile; fp4: int32, S = 2
    zeros: Tensor | None  # uint8, as the scales
    outer_O: Tensor | None  # fp32
    order_I: Tensor | None  # int64
    num_inputs: int
    group: int

    @property
    def bits(self) -> int:
        """Of a code."""
        return 4 * self.words_NOPW.shape[-2]

    @property
    def num_outputs(self) -> int:
        return self.words_NOPW.shape[-3]

    @property
    def num_tiles(self) -> int:
        return self.words_NOPW.shape[-4]

    @property
    def num_slots(self) -> int:
        return self.words_NOPW.shape[0] if self.words_NOPW.dim() == 5 else 1

    def slot(self, number: int) -> "CodedWeight":
        """The matrix of one of many slots."""

        def of_slot(part: Tensor | None) -> Tensor | None:
            return None if part is None else part[number]

        return replace(
            self,
            words_NOPW=self.words_NOPW[number],
            scales=self.scales[number],
            zeros=of_slot(self.zeros),
            outer_O=of_slot(self.outer_O),
            order_I=of_slot(self.order_I),
        )

    @property
    def num_bytes(self) -> int:
        parts = (self.words_NOPW, self.scales, self.zeros, self.outer_O, self.order_I)
        return sum(part.nbytes for part in parts if part is not None)

    @property
    def signature(self) -> tuple[object, ...]:
        """What an op may choose its implementation by."""
        return self.kind, self.group, self.words_NOPW.shape, self.num_inputs, self.zeros is None


def numbers(kind: Kind, codes: Tensor, zeros: Tensor | None) -> Tensor:
    """What codes stand for, in fp32."""
    if kind == "e4m3":
        return codes.view(torch.float8_e4m3fn).float()
    if kind in _MIDDLE:
        return codes.float() - (_MIDDLE[kind] if zeros is None else zeros.float())
    values = NF4_VALUES if kind == "nf4" else (*FP4_VALUES, *(-v for v in FP4_VALUES))
    return torch.tensor(values, device=codes.device)[codes.int()]


def nf4_coded(weight_OI: Tensor) -> Coded | None:
    """The nearest of each group's 16 numbers; None where inputs are no whole groups."""
    if weight_OI.shape[1] % NF4_GROUP:
        return None
    groups_OGI = weight_OI.float().unflatten(1, (-1, NF4_GROUP))
    scales_OG = groups_OGI.abs().amax(-1)
    values = torch.tensor(NF4_VALUES, device=weight_OI.device)
    scaled_OGI = groups_OGI / scales_OG.clamp(min=1e-30).unsqueeze(-1)
    codes_OGI = torch.bucketize(scaled_OGI, (values[1:] + values[:-1]) / 2)
    return Coded("nf4", codes_OGI.flatten(1).to(torch.uint8), scales_OG)


def int8_coded(weight_OI: Tensor) -> Coded:
    """The nearest whole numbers from -127 to 127, with a scale for each output."""
    scales_O1 = weight_OI.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
    codes_OI = (weight_OI / scales_O1).round() + _MIDDLE["int8"]
    return Coded("int8", codes_OI.to(torch.uint8), scales_O1)


def random_coded(
    kind: Kind, num_outputs: int, num_inputs: int, group: int, has_zeros: bool, device: torch.device
) -> Coded:
    """Codes as likely one as the other; products keep the size of what passes through."""
    spread = {"int4": 4.6, "int8": 74.0, "nf4": 0.55, "fp4": 2.93, "e4m3": 0.6}[kind]
    highest = 256 if kind in _EIGHT_BITS else 16
    codes_OI = torch.empty((num_outputs, num_inputs), dtype=torch.uint8, device=device)
    codes_OI.random_(0, highest, generator=torch.Generator(device).manual_seed(num_outputs))
    if kind == "e4m3":
        codes_OI &= 0b10111111  # below two, and none that is no number
    num_groups = num_inputs // group
    scale = 1 / (spread * num_inputs**0.5)
    if kind == "fp4":
        ones = torch.ones((num_outputs, num_groups), device=device).to(torch.float8_e4m3fn)
        outer_O = torch.full((num_outputs,), scale, device=device)
        return Coded(kind, codes_OI, ones, outer_O=outer_O)
    dtype = torch.float32 if kind == "nf4" else torch.bfloat16
    scales_OG = torch.full((num_outputs, num_groups), scale, dtype=dtype, device=device)
    zeros_OG = None
    if has_zeros:
        zeros_OG = torch.full_like(scales_OG, _MIDDLE[kind], dtype=torch.uint8)
    return Coded(kind, codes_OI, scales_OG, zeros_OG)


def pack_coded(parts: Sequence[Coded], keeps_zeros: bool = False) -> CodedWeight | None:
    """The parts' outputs one after the other. None where their groups are of no size that kernels
    read, or where they have little in common.

    Zero points that are all in the middle are left out, unless `keeps_zeros`.
    """
    first = parts[0]
    shared = [(part.kind, part.group, part.scales_OG.dtype) for part in parts]
    if any(other != shared[0] for other in shared) or not _can_pack(first):
        return None
    if any(not _same(part.order_I, first.order_I) for part in parts):
        return None
    codes_OI = torch.cat([part.codes_OI for part in parts])
    scales_OG = torch.cat([part.scales_OG for part in parts])
    zeros_OG, outer_O = _zeros(parts, keeps_zeros), _outer(parts)
    if first.kind == "int8" and zeros_OG is not None:
        return None
    num_inputs, group = codes_OI.shape[1], first.group
    if first.kind == "fp4" and scales_OG.dtype != torch.float8_e4m3fn:
        scales_OG, powers_O = _narrowed(scales_OG)
        outer_O = powers_O if outer_O is None else outer_O * powers_O
        if bool(((scales_OG > 0) & (scales_OG < _SMALLEST_SCALE)).any()):
            return None
    if first.kind == "fp4":
        scales_OG = scales_OG.float().repeat_interleave(group // FP4_GROUP, dim=1)
        group = FP4_GROUP
        # A scale of zero has no place among those on a GPU.
        is_zero_OI = (scales_OG == 0).repeat_interleave(FP4_GROUP, dim=1)
        codes_OI = codes_OI.masked_fill(is_zero_OI, 0)
        scales = _by_tile(_fp4_scales(scales_OG), FP4_GROUP, num_inputs)
        halves_NO2J = scales.unflatten(2, (4, 2)).transpose(2, 3).contiguous()
        scales = halves_NO2J.view(torch.int32).squeeze(3)
    else:
        scales = _by_tile(scales_OG, group, num_inputs)
    return CodedWeight(
        kind=first.kind,
        words_NOPW=_packed(codes_OI, first.kind),
        scales=scales,
        zeros=None if zeros_OG is None else _by_tile(zeros_OG, group, num_inputs),
        outer_O=outer_O,
        order_I=first.order_I,
        num_inputs=num_inputs,
        group=group,
    )


def stack_coded(weights: Sequence[CodedWeight]) -> CodedWeight | None:
    """One for each slot; None where they are not alike."""

    def stacked(parts: Sequence[Tensor | None]) -> Tensor | None:
        return None if parts[0] is None else torch.stack(parts)  # type: ignore[arg-type]

    first = weights[0]
    if any(weight.signature != first.signature for weight in weights):
        return None
    if any((weight.order_I is None) != (first.order_I is None) for weight in weights):
        return None
    return CodedWeight(
        first.kind,
        torch.stack([weight.words_NOPW for weight in weights]),
        torch.stack([weight.scales for weight in weights]),
        stacked([weight.zeros for weight in weights]),
        stacked([weight.outer_O for weight in weights]),
        stacked([weight.order_I for weight in weights]),
        first.num_inputs,
        first.group,
    )


def unpack_coded(weight: CodedWeight) -> Coded:
    """What was packed, of parts that are now one."""
    codes_OI = _unpacked(weight.words_NOPW, weight.kind)[:, : weight.num_inputs]
    num_groups = weight.num_inputs // weight.group
    scales = weight.scales
    if weight.kind == "fp4":
        bytes_NO2J = scales.contiguous().view(torch.uint8).unflatten(2, (2, 4))
        scales = _fp4_numbers(bytes_NO2J.transpose(2, 3).flatten(2))
    scales_OG, zeros_OG = (
        None if x is None else x.transpose(0, 1).flatten(1)[:, :num_groups]
        for x in (scales, weight.zeros)
    )
    assert scales_OG is not None
    return Coded(weight.kind, codes_OI, scales_OG, zeros_OG, weight.outer_O, weight.order_I)


def _can_pack(part: Coded) -> bool:
    group, num_inputs = part.group, part.codes_OI.shape[1]
    if num_inputs % group:
        return False
    if part.kind == "fp4":
        return group in (FP4_GROUP, 2 * FP4_GROUP)
    return group in (32, 64) or group % TILE == 0 or group == num_inputs


def _zeros(parts: Sequence[Coded], keeps_middle: bool) -> Tensor | None:
    if parts[0].kind not in _MIDDLE:
        return None
    middle = _MIDDLE[parts[0].kind]
    found = [part.zeros_OG for part in parts if part.zeros_OG is not None]
    if not keeps_middle and all(bool(zeros_OG.eq(middle).all()) for zeros_OG in found):
        return None
    return torch.cat(
        [
            torch.full_like(part.scales_OG, middle, dtype=torch.uint8)
            if part.zeros_OG is None
            else part.zeros_OG
            for part in parts
        ]
    )


def _outer(parts: Sequence[Coded]) -> Tensor | None:
    if all(part.outer_O is None for part in parts):
        return None
    return torch.cat(
        [
            part.scales_OG.new_ones(len(part.codes_OI), dtype=torch.float32)
            if part.outer_O is None
            else part.outer_O
            for part in parts
        ]
    )


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def _by_tile(x_OG: Tensor, group: int, num_inputs: int) -> Tensor:
    """[N, O, S], or [G, O, 1]."""
    if group >= TILE or group == num_inputs:
        return x_OG.t().unsqueeze(-1).contiguous()
    per_tile = TILE // group
    num_tiles = -(-num_inputs // TILE)
    missing = num_tiles * per_tile - x_OG.shape[1]
    return _padded(x_OG, missing).unflatten(1, (num_tiles, per_tile)).transpose(0, 1).contiguous()


def _padded(x_OG: Tensor, missing: int) -> Tensor:
    if not missing:
        return x_OG
    return torch.cat((x_OG, x_OG.new_zeros((len(x_OG), missing))), dim=1)


def _places(kind: Kind) -> list[list[tuple[int, ...]]]:
    """Where the bits of the first and the second code of a word's four pairs are, lowest first."""
    if kind == "fp4":
        return [[tuple((at + half) % 32 for at in bits) for half in (0, 16)] for bits in PLACES]
    if kind == "nf4":
        codes: list[tuple[int, ...]] = [
            (4 * n, 4 * n + 1, 4 * n + 2, 8 * (n % 4) + (7 if n < 4 else 3)) for n in range(8)
        ]
        return [codes[n : n + 2] for n in range(0, 8, 2)]
    return [[tuple(range(4 * j + half, 4 * j + half + 4)) for half in (0, 16)] for j in range(4)]


@functools.cache
def _spread(kind: Kind) -> Tensor:
    """[4, 256]: the bits of a word that are its j-th pair, by the byte of both codes."""
    bytes_C = torch.arange(256)
    spread_JC = torch.zeros(4, 256, dtype=torch.int64)
    for j, pair in enumerate(_places(kind)):
        for bit, at in enumerate((*pair[0], *pair[1])):
            spread_JC[j] |= ((bytes_C >> bit) & 1) << at
    return spread_JC.int()


def _packed(codes_OI: Tensor, kind: Kind) -> Tensor:
    num_tiles = -(-codes_OI.shape[1] // TILE)
    codes_OI = F.pad(codes_OI, (0, num_tiles * TILE - codes_OI.shape[1]))
    planes = (codes_OI & 15, codes_OI >> 4) if kind in _EIGHT_BITS else (codes_OI,)
    words_NOPW = codes_OI.new_zeros(
        (num_tiles, len(codes_OI), len(planes), WORDS), dtype=torch.int32
    )
    spread_JC = _spread(kind).to(codes_OI.device)
    for number, plane_OI in enumerate(planes):
        nibbles_ONJCTH = plane_OI.unflatten(1, (num_tiles, 4, 4, 4, 2))
        for j in range(4):
            first_ONTC, second_ONTC = nibbles_ONJCTH[:, :, j].transpose(2, 3).unbind(-1)
            pairs = (first_ONTC | second_ONTC << 4).flatten(2).transpose(0, 1)
            words_NOPW[:, :, number] |= spread_JC[j][pairs.int()]
    return words_NOPW


def _unpacked(words_NOPW: Tensor, kind: Kind) -> Tensor:
    words_NOPTC = words_NOPW.unflatten(3, (4, 4))
    nibbles = torch.stack(
        [torch.stack([_gathered(words_NOPTC, bits) for bits in pair], -1) for pair in _places(kind)]
    )  # J N O P T C H
    planes_PONI = nibbles.permute(3, 2, 1, 0, 5, 4, 6).flatten(3).to(torch.uint8)
    codes_ONI = planes_PONI[0]
    if len(planes_PONI) > 1:
        codes_ONI = codes_ONI | planes_PONI[1] << 4
    return codes_ONI.flatten(1)


def _gathered(words: Tensor, places: tuple[int, ...]) -> Tensor:
    """The number whose bits are at these places of the words, lowest first."""
    first = places[0]
    if places == tuple(range(first, first + 4)):
        return (words >> first) & 15
    bits = [((words >> at) & 1) << bit for bit, at in enumerate(places)]
    return functools.reduce(torch.bitwise_or, bits)


def _narrowed(scales_OG: Tensor) -> tuple[Tensor, Tensor]:
    """(scales, powers of two): what is left where an output's largest scale is 256 to 512."""
    _, exponents_O = torch.frexp(scales_OG.amax(1).clamp(min=1e-30))
    powers_O = torch.ldexp(torch.ones_like(scales_OG[:, 0]), exponents_O - 9)
    return scales_OG / powers_O[:, None], powers_O


def _fp4_scales(scales_OG: Tensor) -> Tensor:
    """Bytes of five bits of exponent and three of mantissa; that of zero counts for nothing."""
    mantissa, exponent = torch.frexp(scales_OG.float())  # 0.5 <= mantissa < 1
    bytes_OG = (exponent - 1 + _SCALE_BIAS) * 8 + (mantissa * 16).int() - 8
    return bytes_OG.masked_fill(scales_OG.float() == 0, 8).to(torch.uint8)


def _fp4_numbers(bytes_: Tensor) -> Tensor:
    mantissa = 1 + (bytes_ & 7).float() / 8
    return torch.ldexp(mantissa, (bytes_ >> 3).int() - _SCALE_BIAS)
