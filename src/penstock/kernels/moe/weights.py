"""How the matrices of experts are kept: floats, 8-bit floats with scales, or MXFP4.

MXFP4 is a code of 4 bits (a sign, two bits of exponent, one of mantissa) per number, and a power of
two per 32 inputs. Words of 32 bits hold eight codes; those of 16 words make up 128 inputs of an
output. Word w has input 32 j + 2 w of them in bits 4 j to 4 j + 3, and the one behind it 16 bits
higher: shifted and masked, a word is two neighbours in bfloat16. Inputs are filled up with zeros to
whole tiles.

Legend: S slots, O outputs, I inputs, G groups of 32 inputs, N tiles of 128 inputs, W words of a
tile, J the four groups of a tile.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.formats import PLAIN, Fp8Groups, Fp8Rows, Fp8Static, InputFormat, Plain
from penstock.kernels.fp8 import quantize_fp8, weight_values

MXFP4_GROUP = 32  # inputs that share a scale
TILE = 128  # inputs of 16 words
_WORDS = 16
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of codes; with the highest bit, negative


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWeights:
    """A matrix [outputs, inputs] for each slot, and the form its inputs must have."""

    values: Tensor  # [S, O, I] floats or 8-bit floats; MXFP4: [S, N, O, W] int32
    num_inputs: int
    scale: Tensor | None = None  # 8-bit floats: [S, O] or [S, O / 128, I / 128]; MXFP4: [S, N, O]
    inputs: InputFormat = PLAIN

    @property
    def num_slots(self) -> int:
        return self.values.shape[0]

    @property
    def num_outputs(self) -> int:
        return self.values.shape[2 if self.format == "mxfp4" else 1]

    @property
    def format(self) -> str:
        """ "plain", "fp8 outputs" and "fp8 blocks" by what has a scale, "mxfp4"."""
        if self.values.dtype == torch.int32:
            return "mxfp4"
        if self.scale is None:
            return "plain"
        return "fp8 outputs" if self.scale.dim() == 2 else "fp8 blocks"

    @property
    def signature(self) -> tuple[object, ...]:
        """What an op may choose its implementation by."""
        return self.format, self.values.shape, self.values.dtype

    def matrix(self, slot: int) -> Tensor:
        """The numbers of one slot, [O, I] in float32."""
        if self.scale is None:
            return self.values[slot].float()
        if self.format == "mxfp4":
            return _unpacked(self.values[slot], self.scale[slot])[:, : self.num_inputs]
        return weight_values(self.values[slot], self.scale[slot])


def plain_weights(values_SOI: Tensor) -> ExpertWeights:
    return ExpertWeights(values_SOI, values_SOI.shape[2])


def as_inputs(
    x_TI: Tensor,
    wanted: InputFormat,
    quantize: Callable[[Tensor, Tensor | None, int], tuple[Tensor, Tensor]] = quantize_fp8,
) -> tuple[Tensor, Tensor | None]:
    """(values, scales) of `x` in the form that weights want."""
    match wanted:
        case Plain():
            return x_TI, None
        case Fp8Static(scale_1):
            return quantize(x_TI, scale_1, 0)
        case Fp8Rows():
            return quantize(x_TI, None, 0)
        case Fp8Groups(size):
            return quantize(x_TI, None, size)
    raise AssertionError(wanted)


def mxfp4_values(blocks_OB: Tensor, scales_OG: Tensor) -> Tensor:
    """[O, I] in float32 of what checkpoints store: two codes a byte, the lower one first."""
    codes_OI = torch.stack((blocks_OB & 15, blocks_OB >> 4), dim=-1).flatten(-2)
    return _scaled(codes_OI.unflatten(-1, (-1, MXFP4_GROUP)), scales_OG).flatten(-2)


def pack_mxfp4(blocks_SOB: Tensor, scales_SOG: Tensor) -> ExpertWeights:
    """What checkpoints store, in the order that kernels read: slot by slot, to save memory."""
    num_slots, num_outputs, num_groups = scales_SOG.shape
    num_tiles = math.ceil(num_groups * MXFP4_GROUP / TILE)
    shape, device = (num_slots, num_tiles, num_outputs), blocks_SOB.device
    words_SNOW = torch.empty((*shape, _WORDS), dtype=torch.int32, device=device)
    scale_SNO = torch.empty(shape, dtype=torch.int32, device=device)
    for slot in range(num_slots):
        words_SNOW[slot], scale_SNO[slot] = _packed(blocks_SOB[slot], scales_SOG[slot], num_tiles)
    return ExpertWeights(words_SNOW, num_groups * MXFP4_GROUP, scale_SNO)


def _packed(blocks_OB: Tensor, scales_OG: Tensor, num_tiles: int) -> tuple[Tensor, Tensor]:
    num_outputs, num_groups = scales_OG.shape
    missing = num_tiles * TILE // MXFP4_GROUP - num_groups
    blocks_OB = torch.nn.functional.pad(blocks_OB, (0, missing * MXFP4_GROUP // 2))
    scales_OG = torch.nn.functional.pad(scales_OG, (0, missing))
    pairs_ONJW = blocks_OB.view(num_outputs, num_tiles, 4, _WORDS).int()
    words_ONW = torch.zeros((num_outputs, num_tiles, _WORDS), dtype=torch.int32)
    words_ONW = words_ONW.to(blocks_OB.device)
    for group in range(4):
        pair_ONW = pairs_ONJW[:, :, group]
        spread_ONW = (pair_ONW & 15) | ((pair_ONW >> 4) << 16)
        words_ONW |= spread_ONW << (4 * group)
    scales_ON = scales_OG.contiguous().view(torch.int32)
    return words_ONW.transpose(0, 1), scales_ON.t()


def _unpacked(words_NOW: Tensor, scale_NO: Tensor) -> Tensor:
    """[O, I] in float32, inputs of whole tiles."""
    j_J = torch.arange(4, device=words_NOW.device)
    shifts_J12 = torch.stack((4 * j_J, 4 * j_J + 16), dim=-1).unsqueeze(1)
    codes_ONJW2 = (words_NOW.transpose(0, 1)[:, :, None, :, None] >> shifts_J12) & 15
    scales_ONJ = (scale_NO.t().unsqueeze(-1) >> (8 * j_J)) & 255
    return _scaled(codes_ONJW2.flatten(3).flatten(1, 2), scales_ONJ.flatten(1)).flatten(1)


def _scaled(codes_OGI: Tensor, scales_OG: Tensor) -> Tensor:
    values = torch.tensor([*_VALUES, *(-v for v in _VALUES)], device=codes_OGI.device)
    return torch.ldexp(values[codes_OGI.int()], scales_OG.int().unsqueeze(-1) - 127)
