"""Quantization of activations to block-scaled formats, which the tensor cores of Blackwell scale
themselves: MXFP8 and NVFP4.

MXFP8 is E4M3 with a power of two (E8M0: the exponent of a float, biased by 127) per 32 channels.
NVFP4 is E2M1 with a scale in E4M3 per 16 channels, times one scale in fp32 for all; two codes lie
in a byte, the first one in its lower half.

Legend: T tokens, D channels, G groups of channels, B bytes of two codes.
"""

import itertools

import torch
from torch import Tensor

from penstock.kernels.op import op
from penstock.kernels.quantize.reference import FP8_MAX
from penstock.kernels.quantized_weight import FP4_GROUP, FP4_VALUES

MXFP8_GROUP = 32
FP4_MAX = FP4_VALUES[-1]

_TRITON = "penstock.kernels.quantize.block_scaled_triton"


@op(gpu_module=_TRITON)
def quantize_mxfp8(x_TD: Tensor) -> tuple[Tensor, Tensor]:
    """(values_TD in E4M3, powers_TG in uint8): the smallest power of two by which the largest of a
    group does not leave the range of E4M3."""
    x_TGD = x_TD.float().unflatten(1, (-1, MXFP8_GROUP))
    bits_TG = (x_TGD.abs().amax(-1) / FP8_MAX).view(torch.int32)
    powers_TG = (bits_TG >> 23) + ((bits_TG & 0x7FFFFF) != 0)
    factors_TG = ((254 - powers_TG) << 23).view(torch.float32)  # 1 / 2^(power - 127), exactly
    values_TGD = (x_TGD * factors_TG.unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX)
    return values_TGD.flatten(1).to(torch.float8_e4m3fn), powers_TG.to(torch.uint8)


@op(gpu_module=_TRITON)
def quantize_nvfp4(x_TD: Tensor, scale_1: Tensor) -> tuple[Tensor, Tensor]:
    """(codes_TB in uint8, scales_TG in E4M3): a group's scale times `scale_1` maps its largest
    value to the largest of E2M1. What is too large for that becomes the largest there is."""
    x_TGD = x_TD.float().unflatten(1, (-1, FP4_GROUP))
    wanted_TG = x_TGD.abs().amax(-1) / (FP4_MAX * scale_1)
    scales_TG = wanted_TG.clamp(max=FP8_MAX).to(torch.float8_e4m3fn)
    factors_TG = scales_TG.float() * scale_1
    inverse_TG = torch.where(factors_TG > 0, 1 / factors_TG, 0.0)
    codes_TD = e2m1_codes(x_TGD * inverse_TG.unsqueeze(-1)).flatten(1)
    return codes_TD[:, ::2] | codes_TD[:, 1::2] << 4, scales_TG


def e2m1_codes(x: Tensor) -> Tensor:
    """The nearest values of E2M1 as codes, ties to the even one."""
    size = x.abs()
    code = torch.zeros_like(x, dtype=torch.uint8)
    for low, high in itertools.pairwise(FP4_VALUES):
        middle, to_even = (low + high) / 2, FP4_VALUES.index(high) % 2 == 0
        code += size >= middle if to_even else size > middle
    return code | (x < 0).to(torch.uint8) << 3


def mxfp8_values(values_TD: Tensor, powers_TG: Tensor) -> Tensor:
    """What `quantize_mxfp8` gives stands for, in fp32."""
    factors_TG = powers_of_two(powers_TG)
    return values_TD.float() * factors_TG.repeat_interleave(MXFP8_GROUP, dim=1)


def nvfp4_values(codes_TB: Tensor, scales_TG: Tensor, scale_1: Tensor) -> Tensor:
    """What `quantize_nvfp4` gives stands for, in fp32."""
    factors_TG = scales_TG.float() * scale_1
    return e2m1_values(codes_TB) * factors_TG.repeat_interleave(FP4_GROUP, dim=1)


def e2m1_values(codes_B: Tensor) -> Tensor:
    """Two values for each byte of the last dimension, in fp32."""
    table = torch.tensor((*FP4_VALUES, *(-v for v in FP4_VALUES)), device=codes_B.device)
    return table[torch.stack((codes_B & 15, codes_B >> 4), dim=-1).flatten(-2).int()]


def powers_of_two(powers: Tensor) -> Tensor:
    """What E8M0 stands for: 2^(power - 127), and no number for 255."""
    found = torch.ldexp(torch.ones_like(powers, dtype=torch.float32), powers.int() - 127)
    return found.masked_fill(powers == 255, torch.nan)
