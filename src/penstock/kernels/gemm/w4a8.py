"""`w4a8_linear`: the GEMM of FP8 (E4M3) activations and INT4 weights in groups (W4A8).

Legend: T tokens, I inputs, O outputs, G groups of inputs, B bytes of two weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.op import op
from penstock.kernels.quantized_weight import ZERO_POINTS, QuantizedWeight

TILE = 128


@dataclass(frozen=True, slots=True, eq=False)
class W4A8Weight:
    """A matrix [outputs, inputs] as the kernel reads it: E4M3 numbers a few bit operations away.

    Byte 64 n + j of a row has input 128 n + j in its lower half, 128 n + 64 + j in its upper one. A
    half is the size in three bits and the sign; no size with a sign is -8. Size and sign in their
    places of an E4M3 number, which begins with its subnormal ones, are 2^-9 times the integer.
    """

    halves_OB: Tensor  # uint8
    scales_GO: Tensor  # floats
    input_scale_1: Tensor  # fp32: of all activations

    @property
    def out_features(self) -> int:
        return self.halves_OB.shape[0]

    @property
    def in_features(self) -> int:
        return 2 * self.halves_OB.shape[1]

    @property
    def group(self) -> int:
        return self.in_features // self.scales_GO.shape[0]

    @property
    def num_bytes(self) -> int:
        return self.halves_OB.nbytes + self.scales_GO.nbytes

    @property
    def signature(self) -> tuple[object, ...]:
        """What an op may choose its implementation by."""
        return self.halves_OB.shape, self.group

    def values(self) -> Tensor:
        """The matrix [O, I] in fp32."""
        low_OB, high_OB = self.halves_OB & 15, self.halves_OB >> 4
        halves = torch.cat([half.unflatten(1, (-1, TILE // 2)) for half in (low_OB, high_OB)], 2)
        sizes = torch.where(halves == 8, 8, halves & 7).flatten(1)
        numbers_OI = sizes.float() * torch.where(halves.flatten(1) < 8, 1.0, -1.0)
        scales_OG = self.scales_GO.t().float()
        return numbers_OI * scales_OG.repeat_interleave(self.group, dim=1)


@op(gpu_module="penstock.kernels.gemm.w4a8_triton")
def w4a8_linear(
    x_TI: Tensor, scale_1: Tensor, weight: W4A8Weight, bias_O: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """(x * scale) W^T + b of E4M3 x, in fp32, rounded to `dtype`."""
    y_TO = F.linear(x_TI.float() * scale_1, weight.values())
    return (y_TO if bias_O is None else y_TO + bias_O.float()).to(dtype)


def pack_w4a8(parts: Sequence[QuantizedWeight]) -> W4A8Weight | None:
    """The parts' outputs one after the other. None where nothing says how activations are scaled,
    or a group is not of whole tiles. The largest of several scales lets nothing overflow."""
    group = parts[0].group
    if group % TILE or any((part.kind, part.group) != ("int4", group) for part in parts):
        return None
    input_scales = [part.input_scale for part in parts if part.input_scale is not None]
    is_plain = all(part.zeros_OG is None and part.order_I is None for part in parts)
    if len(input_scales) < len(parts) or not is_plain:
        return None
    numbers_OI = torch.cat([part.codes_OI for part in parts]).view(torch.int8) - ZERO_POINTS["int4"]
    halves_OI = (numbers_OI.abs() & 7) | (numbers_OI < 0).to(torch.int8) << 3
    low, high = halves_OI.view(torch.uint8).unflatten(1, (-1, 2, TILE // 2)).unbind(2)
    return W4A8Weight(
        (low | high << 4).flatten(1),
        torch.cat([part.scales_OG for part in parts]).t().contiguous(),
        torch.stack(input_scales).amax().float().view(1),
    )
