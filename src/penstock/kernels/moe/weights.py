"""`ExpertWeights`: the stacked matrices of experts: plain, FP8 with scales, or MXFP4.

MXFP4 is a code of 4 bits (a sign, two bits of exponent, one of mantissa) per number, and a power of
two per 32 inputs. Words of 32 bits hold eight codes; those of 16 words make up 128 inputs of an
output. Word 4 t + c has input 32 j + 8 c + 2 t of them as the j-th code of its lower half, and the
one behind it as that of its upper half: four words in a row are one thread's part of an MMA
fragment. Inputs are filled up with zeros to whole tiles.

The bits of a word are such that a rotation and a mask make two codes two bfloat16, with their signs
nine bits above exponents and mantissas. From a half's highest: s3 e2 e2 m2 s0 e1 e1 m1 e3 m3 s2 e0
e0 m0 s1 e3, where s1 and s2 are those of the other half; of the fourth code, which fills the gaps,
one bit is moved by itself. Four powers of two lie in a word, each as the exponent of a bfloat16
that is 2^-32 times as large: so scaled codes stay in range for powers up to 2^33, the most
there can be.

Legend: S slots, O outputs, I inputs, G groups of 32 inputs, N tiles of 128 inputs, W words of a
tile, J the four groups of a tile.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock.kernels.formats import PLAIN, Fp8Groups, Fp8Rows, Fp8Static, InputFormat, Plain
from penstock.kernels.gemm.fp8 import dequantized
from penstock.kernels.gemm.wna16_packing import FP4_BITS, TILE, WORDS, spread
from penstock.kernels.quantize import quantize_fp8
from penstock.kernels.quantized_weight import FP4_VALUES

MXFP4_GROUP = 32  # inputs that share a scale
_SLOTS_AT_ONCE = 8
_MAX_SCALE = 160
_POWER_BIAS = 94  # 127 - 32 - 1: codes are read as 2^-126 times their value


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWeights:
    """A matrix [outputs, inputs] for each slot, and the form its inputs must have."""

    values: Tensor  # [S, O, I] plain or FP8; MXFP4: [S, N, O, W] int32
    in_features: int
    scale: Tensor | None = None  # FP8: [S, O] or [S, O / 128, I / 128]; MXFP4: [S, N, O]
    inputs: InputFormat = PLAIN
    has_all: bool = True  # every expert is here; else slot `num_slots` says that one is elsewhere

    @property
    def num_slots(self) -> int:
        return self.values.shape[0]

    @property
    def out_features(self) -> int:
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
            return _unpacked(self.values[slot], self.scale[slot])[:, : self.in_features]
        return dequantized(self.values[slot], self.scale[slot])


def plain_weights(values_SOI: Tensor, has_all: bool = True) -> ExpertWeights:
    return ExpertWeights(values_SOI, values_SOI.shape[2], has_all=has_all)


def as_inputs(
    x_TI: Tensor,
    wanted: InputFormat,
    quantize: Callable[[Tensor, Tensor | None, int], tuple[Tensor, Tensor]] = quantize_fp8,
) -> tuple[Tensor, Tensor | None]:
    """(values, scales) of `x` in the input format of the weights."""
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


def pointer(tensor: Tensor | None, other: Tensor) -> Tensor:
    """Kernels take an address also where they do not read what it is of."""
    return other if tensor is None else tensor


def mxfp4_values(blocks_OB: Tensor, scales_OG: Tensor) -> Tensor:
    """[O, I] in float32 of what checkpoints store: two codes a byte, the lower one first."""
    codes_OI = torch.stack((blocks_OB & 15, blocks_OB >> 4), dim=-1).flatten(-2)
    return _scaled(codes_OI.unflatten(-1, (-1, MXFP4_GROUP)), scales_OG).flatten(-2)


def pack_mxfp4(blocks_SOB: Tensor, scales_SOG: Tensor, has_all: bool = True) -> ExpertWeights:
    """What checkpoints store, in the order that kernels read; some slots at once to save memory."""
    largest = int(scales_SOG.max()) if scales_SOG.numel() else 0
    if largest > _MAX_SCALE:
        raise ConfigError(
            f"the checkpoint has an MXFP4 scale of {largest}, 2^{largest - 127} (255: NaN); "
            f"experts are computed with scales up to {_MAX_SCALE}, 2^{_MAX_SCALE - 127}"
        )
    num_slots, out_features, num_groups = scales_SOG.shape
    num_tiles = math.ceil(num_groups * MXFP4_GROUP / TILE)
    shape, device = (num_slots, num_tiles, out_features), blocks_SOB.device
    words_SNOW = torch.empty((*shape, WORDS), dtype=torch.int32, device=device)
    scale_SNO = torch.empty(shape, dtype=torch.int32, device=device)
    spread_JC = spread("fp4").to(device)
    for first in range(0, num_slots, _SLOTS_AT_ONCE):
        some = slice(first, first + _SLOTS_AT_ONCE)
        words_SNOW[some] = _packed_words(blocks_SOB[some], num_tiles, spread_JC)
        scale_SNO[some] = _packed_powers(scales_SOG[some], num_tiles)
    return ExpertWeights(words_SNOW, num_groups * MXFP4_GROUP, scale_SNO, has_all=has_all)


def _packed_words(blocks_SOB: Tensor, num_tiles: int, spread_JC: Tensor) -> Tensor:
    missing = num_tiles * TILE // 2 - blocks_SOB.shape[-1]
    pairs_SOB = torch.nn.functional.pad(blocks_SOB, (0, missing)).int()
    pairs_SONJW = pairs_SOB.unflatten(-1, (num_tiles, 4, WORDS))
    words_SONW = torch.zeros_like(pairs_SONJW[..., 0, :])
    for group in range(4):
        words_SONW |= spread_JC[group][pairs_SONJW[..., group, :]]
    return _transposed(words_SONW).transpose(1, 2)


def _packed_powers(scales_SOG: Tensor, num_tiles: int) -> Tensor:
    missing = num_tiles * TILE // MXFP4_GROUP - scales_SOG.shape[-1]
    powers_SOG = (scales_SOG + _POWER_BIAS).to(torch.uint8)
    powers_SOG = torch.nn.functional.pad(powers_SOG, (0, missing))
    return powers_SOG.view(torch.int32).transpose(1, 2)


def _unpacked(words_NOW: Tensor, scale_NO: Tensor) -> Tensor:
    """[O, I] in float32, inputs of whole tiles."""
    words_ONW = _transposed(words_NOW.transpose(0, 1))
    codes = [
        torch.stack([((words_ONW >> (at + half) % 32) & 1) << bit for bit, at in enumerate(places)])
        for places in FP4_BITS
        for half in (0, 16)
    ]
    codes_ONJW2 = torch.stack(codes).sum(1).unflatten(0, (4, 2)).permute(2, 3, 0, 4, 1)
    j_J = torch.arange(4, device=words_NOW.device)
    scales_ONJ = ((scale_NO.t().unsqueeze(-1) >> (8 * j_J)) & 255) - _POWER_BIAS
    return _scaled(codes_ONJW2.flatten(3).flatten(1, 2), scales_ONJ.flatten(1)).flatten(1)


def _transposed(words: Tensor) -> Tensor:
    """Word t + 4 c of a tile to place 4 t + c, and back."""
    return words.unflatten(-1, (4, 4)).transpose(-1, -2).flatten(-2)


def _scaled(codes_OGI: Tensor, scales_OG: Tensor) -> Tensor:
    values = torch.tensor([*FP4_VALUES, *(-v for v in FP4_VALUES)], device=codes_OGI.device)
    return torch.ldexp(values[codes_OGI.int()], scales_OG.int().unsqueeze(-1) - 127)
