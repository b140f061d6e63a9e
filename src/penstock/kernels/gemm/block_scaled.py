"""`scaled_linear`: the GEMM of block-scaled weights (NVFP4, MXFP4) with activations that are
quantized to NVFP4 or MXFP8 first: W4A4 and W4A8, where `weight_only_linear` leaves them plain.

Legend: T tokens, I inputs, O outputs, G groups of inputs, B bytes of two codes, S slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.op import op
from penstock.kernels.quantize.block_scaled import (
    MXFP8_GROUP,
    e2m1_values,
    mxfp8_values,
    nvfp4_values,
    powers_of_two,
    quantize_mxfp8,
    quantize_nvfp4,
)
from penstock.kernels.quantized_weight import FP4_GROUP, QuantizedWeight


@dataclass(frozen=True, slots=True, eq=False)
class ScaledWeight:
    """A matrix [outputs, inputs] in E2M1 as checkpoints store it, which is what scaled tensor cores
    read; or one for each of many slots, whose tensors have a dimension more, the first."""

    codes_OB: Tensor  # uint8, the first of two codes in the lower half
    scales_OG: Tensor  # NVFP4: E4M3, per 16 inputs; MXFP4: E8M0 in uint8, per 32
    outer_O: Tensor | None = None  # fp32
    input_scale_1: Tensor | None = None  # NVFP4: that of all activations. None: they become MXFP8

    @property
    def is_nvfp4(self) -> bool:
        return self.input_scale_1 is not None

    @property
    def out_features(self) -> int:
        return self.codes_OB.shape[-2]

    @property
    def in_features(self) -> int:
        return 2 * self.codes_OB.shape[-1]

    @property
    def num_slots(self) -> int:
        return self.codes_OB.shape[0] if self.codes_OB.dim() == 3 else 1

    @property
    def num_bytes(self) -> int:
        parts = (self.codes_OB, self.scales_OG, self.outer_O)
        return sum(part.nbytes for part in parts if part is not None)

    @property
    def signature(self) -> tuple[object, ...]:
        """What an op may choose its implementation by."""
        return self.is_nvfp4, self.codes_OB.shape

    def slot(self, number: int) -> "ScaledWeight":
        """The matrix of one of many slots."""
        outer_O = None if self.outer_O is None else self.outer_O[number]
        codes_OB, scales_OG = self.codes_OB[number], self.scales_OG[number]
        return ScaledWeight(codes_OB, scales_OG, outer_O, self.input_scale_1)

    def values(self) -> Tensor:
        """The matrix [O, I] in fp32."""
        group = FP4_GROUP if self.is_nvfp4 else MXFP8_GROUP
        scales_OG = self.scales_OG
        factors_OG = scales_OG.float() if self.is_nvfp4 else powers_of_two(scales_OG)
        if self.outer_O is not None:
            factors_OG = factors_OG * self.outer_O[:, None]
        return e2m1_values(self.codes_OB) * factors_OG.repeat_interleave(group, dim=1)

    def rounded(self, x_TI: Tensor) -> Tensor:
        """Activations as the GEMM takes them, in fp32."""
        if self.input_scale_1 is None:
            return mxfp8_values(*quantize_mxfp8.reference(x_TI))
        quantized = quantize_nvfp4.reference(x_TI, self.input_scale_1)
        return nvfp4_values(*quantized, self.input_scale_1)


@op(gpu_module="penstock.kernels.gemm.block_scaled_triton")
def scaled_linear(x_TI: Tensor, weight: ScaledWeight, bias_O: Tensor | None) -> Tensor:
    """x W^T + b of quantized x, in fp32, back in x's dtype."""
    return scaled_linear32(x_TI, weight, bias_O).to(x_TI.dtype)


def scaled_linear32(x_TI: Tensor, weight: ScaledWeight, bias_O: Tensor | None) -> Tensor:
    """The same, left in fp32."""
    y_TO = F.linear(weight.rounded(x_TI), weight.values())
    return y_TO if bias_O is None else y_TO + bias_O.float()


def scaled_weight(parts: Sequence[QuantizedWeight]) -> ScaledWeight | None:
    """The parts' outputs one after the other; None where they are not such weights, or nothing says
    how activations are scaled. The largest of several scales lets nothing overflow."""
    group, dtype = parts[0].group, parts[0].scales_OG.dtype
    if any((p.kind, p.group, p.scales_OG.dtype) != ("fp4", group, dtype) for p in parts):
        return None
    codes_OI = torch.cat([part.codes_OI for part in parts])
    codes_OB = codes_OI[:, ::2] | codes_OI[:, 1::2] << 4
    scales_OG = torch.cat([part.scales_OG for part in parts])
    match group, dtype:
        case 16, torch.float8_e4m3fn:
            input_scales = [part.input_scale for part in parts if part.input_scale is not None]
            outers = [part.outer_O for part in parts if part.outer_O is not None]
            if len(input_scales) < len(parts) or len(outers) < len(parts):
                return None
            input_scale_1 = torch.stack(input_scales).amax().float().view(1)
            return ScaledWeight(codes_OB, scales_OG, torch.cat(outers), input_scale_1)
        case 32, torch.float32:
            mantissas_OG, exponents_OG = torch.frexp(scales_OG)
            assert bool((mantissas_OG == 0.5).all()), "MXFP4's scales are powers of two"
            return ScaledWeight(codes_OB, (exponents_OG + 126).to(torch.uint8))
    return None


def stack_scaled(weights: Sequence[ScaledWeight | None]) -> ScaledWeight | None:
    """One for each slot; None where one of them is None."""
    found = [weight for weight in weights if weight is not None]
    if len(found) < len(weights):
        return None
    outers = [weight.outer_O for weight in found if weight.outer_O is not None]
    inputs = [weight.input_scale_1 for weight in found if weight.input_scale_1 is not None]
    return ScaledWeight(
        torch.stack([weight.codes_OB for weight in found]),
        torch.stack([weight.scales_OG for weight in found]),
        torch.stack(outers) if outers else None,
        torch.stack(inputs).amax(0) if inputs else None,
    )
