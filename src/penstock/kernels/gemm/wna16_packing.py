"""`GpuPackedWeight`: a `QuantizedWeight` in the order in which GPU kernels read it.

Words of 32 bits hold four pairs of codes; those of 16 words make up 128 inputs of an output (a
tile). Word 4 t + c has inputs 32 j + 8 c + 2 t and the one behind it as its j-th pair: four words
in a row are one thread's part of an MMA fragment. INT4 and INT8 have the pair's first code at bit 4
j of the word's lower half, the second at that of the upper half. FP4 lies as MXFP4 does in
`moe.weights` (`FP4_BITS`). NF4 has three bits of code n at bit 4 n; the fourth, which chooses
between two tables, is the highest of a byte's upper half for the first four codes, of its lower
half for the others. Codes of 8 bits are two planes, the lower halves of all codes and the upper
ones. Inputs are filled up to whole tiles.

Scales of groups of up to 128 inputs lie by tile, those of larger ones by group. The scales of FP4
are E4M3 without a sign; a sign's bit lets them have five bits of exponent here, so that none of
them is subnormal.

Legend: O outputs, I inputs, G groups of inputs, N tiles of 128 inputs, P planes, W words of a tile,
S scales of an output's tile.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.quantized_weight import (
    EIGHT_BIT_KINDS,
    FP4_GROUP,
    ZERO_POINTS,
    Kind,
    QuantizedWeight,
)

TILE = 128
WORDS = 16
FP4_BITS = ((2, 3, 4, 11), (8, 9, 10, 17), (12, 13, 14, 21), (6, 7, 0, 15))
"""Where the bits of a half word's four codes lie, mantissa first, sign last; counted around the
word (`moe.weights`)."""
_SCALE_BIAS = 10  # of the exponents of FP4 scales
_SMALLEST_SCALE = 2.0 ** (1 - _SCALE_BIAS)


@dataclass(frozen=True, slots=True, eq=False)
class GpuPackedWeight:
    """A matrix [outputs, inputs] as kernels read it; or one for each of many slots, whose tensors
    have a dimension more, the first."""

    kind: Kind
    words_NOPW: Tensor  # int32
    scales: Tensor  # [N, O, S], or [G, O, 1] of groups larger than a tile; fp4: int32, S = 2
    zeros: Tensor | None  # uint8, as the scales
    outer_O: Tensor | None  # fp32
    order_I: Tensor | None  # int64
    in_features: int
    group: int

    @property
    def bits(self) -> int:
        """Of a code."""
        return 4 * self.words_NOPW.shape[-2]

    @property
    def out_features(self) -> int:
        return self.words_NOPW.shape[-3]

    @property
    def num_tiles(self) -> int:
        return self.words_NOPW.shape[-4]

    @property
    def num_slots(self) -> int:
        return self.words_NOPW.shape[0] if self.words_NOPW.dim() == 5 else 1

    def slot(self, number: int) -> "GpuPackedWeight":
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
        return self.kind, self.group, self.words_NOPW.shape, self.in_features, self.zeros is None


def pack_gpu(parts: Sequence[QuantizedWeight], keeps_zeros: bool = False) -> GpuPackedWeight | None:
    """The parts' outputs one after the other. None where their groups are of no size that kernels
    read, or where the parts differ in kind, group, order or the dtype of their scales.

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
    in_features, group = codes_OI.shape[1], first.group
    if first.kind == "fp4" and scales_OG.dtype != torch.float8_e4m3fn:
        scales_OG, powers_O = _narrowed(scales_OG)
        outer_O = powers_O if outer_O is None else outer_O * powers_O
        if bool(((scales_OG > 0) & (scales_OG < _SMALLEST_SCALE)).any()):
            return None
    if first.kind == "fp4":
        scales_OG = scales_OG.float().repeat_interleave(group // FP4_GROUP, dim=1)
        group = FP4_GROUP
        # The packed scales have no zero.
        is_zero_OI = (scales_OG == 0).repeat_interleave(FP4_GROUP, dim=1)
        codes_OI = codes_OI.masked_fill(is_zero_OI, 0)
        scales = _by_tile(_fp4_scales(scales_OG), FP4_GROUP, in_features)
        halves_NO2J = scales.unflatten(2, (4, 2)).transpose(2, 3).contiguous()
        scales = halves_NO2J.view(torch.int32).squeeze(3)
    else:
        scales = _by_tile(scales_OG, group, in_features)
    return GpuPackedWeight(
        kind=first.kind,
        words_NOPW=_packed(codes_OI, first.kind),
        scales=scales,
        zeros=None if zeros_OG is None else _by_tile(zeros_OG, group, in_features),
        outer_O=outer_O,
        order_I=first.order_I,
        in_features=in_features,
        group=group,
    )


def stack_packed(weights: Sequence[GpuPackedWeight]) -> GpuPackedWeight | None:
    """One for each slot; None where their signatures differ."""

    def stacked(parts: Sequence[Tensor | None]) -> Tensor | None:
        return None if parts[0] is None else torch.stack(parts)  # type: ignore[arg-type]

    first = weights[0]
    if any(weight.signature != first.signature for weight in weights):
        return None
    if any((weight.order_I is None) != (first.order_I is None) for weight in weights):
        return None
    return GpuPackedWeight(
        first.kind,
        torch.stack([weight.words_NOPW for weight in weights]),
        torch.stack([weight.scales for weight in weights]),
        stacked([weight.zeros for weight in weights]),
        stacked([weight.outer_O for weight in weights]),
        stacked([weight.order_I for weight in weights]),
        first.in_features,
        first.group,
    )


def unpack_gpu(weight: GpuPackedWeight) -> QuantizedWeight:
    """What was packed, of parts that are now one."""
    codes_OI = _unpacked(weight.words_NOPW, weight.kind)[:, : weight.in_features]
    num_groups = weight.in_features // weight.group
    scales = weight.scales
    if weight.kind == "fp4":
        bytes_NO2J = scales.contiguous().view(torch.uint8).unflatten(2, (2, 4))
        scales = _fp4_numbers(bytes_NO2J.transpose(2, 3).flatten(2))
    scales_OG, zeros_OG = (
        None if x is None else x.transpose(0, 1).flatten(1)[:, :num_groups]
        for x in (scales, weight.zeros)
    )
    assert scales_OG is not None
    return QuantizedWeight(
        weight.kind, codes_OI, scales_OG, zeros_OG, weight.outer_O, weight.order_I
    )


def _can_pack(part: QuantizedWeight) -> bool:
    group, in_features = part.group, part.codes_OI.shape[1]
    if part.kind == "affine" or in_features % group:
        return False
    if part.kind == "fp4":
        return group in (FP4_GROUP, 2 * FP4_GROUP)
    return group in (32, 64) or group % TILE == 0 or group == in_features


def _zeros(parts: Sequence[QuantizedWeight], keeps_middle: bool) -> Tensor | None:
    if parts[0].kind not in ZERO_POINTS:
        return None
    middle = ZERO_POINTS[parts[0].kind]
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


def _outer(parts: Sequence[QuantizedWeight]) -> Tensor | None:
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


def _by_tile(x_OG: Tensor, group: int, in_features: int) -> Tensor:
    """[N, O, S], or [G, O, 1]."""
    if group >= TILE or group == in_features:
        return x_OG.t().unsqueeze(-1).contiguous()
    per_tile = TILE // group
    num_tiles = -(-in_features // TILE)
    missing = num_tiles * per_tile - x_OG.shape[1]
    return _padded(x_OG, missing).unflatten(1, (num_tiles, per_tile)).transpose(0, 1).contiguous()


def _padded(x_OG: Tensor, missing: int) -> Tensor:
    if not missing:
        return x_OG
    return torch.cat((x_OG, x_OG.new_zeros((len(x_OG), missing))), dim=1)


def bit_positions(kind: Kind) -> list[list[tuple[int, ...]]]:
    """Where the bits of the first and the second code of a word's four pairs are, lowest first."""
    if kind == "fp4":
        return [[tuple((at + half) % 32 for at in bits) for half in (0, 16)] for bits in FP4_BITS]
    if kind == "nf4":
        codes: list[tuple[int, ...]] = [
            (4 * n, 4 * n + 1, 4 * n + 2, 8 * (n % 4) + (7 if n < 4 else 3)) for n in range(8)
        ]
        return [codes[n : n + 2] for n in range(0, 8, 2)]
    return [[tuple(range(4 * j + half, 4 * j + half + 4)) for half in (0, 16)] for j in range(4)]


@functools.cache
def spread(kind: Kind) -> Tensor:
    """[4, 256]: the bits of a word that are its j-th pair, by the byte of both codes."""
    bytes_C = torch.arange(256)
    spread_JC = torch.zeros(4, 256, dtype=torch.int64)
    for j, pair in enumerate(bit_positions(kind)):
        for bit, at in enumerate((*pair[0], *pair[1])):
            spread_JC[j] |= ((bytes_C >> bit) & 1) << at
    return spread_JC.int()


def _packed(codes_OI: Tensor, kind: Kind) -> Tensor:
    num_tiles = -(-codes_OI.shape[1] // TILE)
    codes_OI = F.pad(codes_OI, (0, num_tiles * TILE - codes_OI.shape[1]))
    planes = (codes_OI & 15, codes_OI >> 4) if kind in EIGHT_BIT_KINDS else (codes_OI,)
    words_NOPW = codes_OI.new_zeros(
        (num_tiles, len(codes_OI), len(planes), WORDS), dtype=torch.int32
    )
    spread_JC = spread(kind).to(codes_OI.device)
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
        [
            torch.stack([_gathered(words_NOPTC, bits) for bits in pair], -1)
            for pair in bit_positions(kind)
        ]
    )  # J N O P T C H
    planes_PONI = nibbles.permute(3, 2, 1, 0, 5, 4, 6).flatten(3).to(torch.uint8)
    codes_ONI = planes_PONI[0]
    if len(planes_PONI) > 1:
        codes_ONI = codes_ONI | planes_PONI[1] << 4
    return codes_ONI.flatten(1)


def _gathered(words: Tensor, positions: tuple[int, ...]) -> Tensor:
    """The number whose bits are at these positions of the words, lowest first."""
    first = positions[0]
    if positions == tuple(range(first, first + 4)):
        return (words >> first) & 15
    bits = [((words >> at) & 1) << bit for bit, at in enumerate(positions)]
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
