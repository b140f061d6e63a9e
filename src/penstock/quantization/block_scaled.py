"""Block-scaled schemes (W4A4 in NVFP4, W4A8 in MXFP4 and MXFP8): weights stay as the checkpoint has
them, activations are quantized to what the tensor cores of Blackwell multiply them with.

A layer whose parts do not all say how is weight-only.
"""

from typing import Any

from torch import Tensor

from penstock.kernels.formats import Activation
from penstock.kernels.gemm.block_scaled import (
    ScaledWeight,
    scaled_linear,
    scaled_weight,
    stack_scaled,
)
from penstock.kernels.moe.block_scaled import scaled_experts
from penstock.parallel.parameter import UnreadParameter
from penstock.quantization.mxfp4 import Mxfp4Experts
from penstock.quantization.scheme import largest_of_ranks
from penstock.quantization.weight_only import (
    WeightOnlyExperts,
    WeightOnlyScheme,
    quantized_parts,
)


class BlockScaledScheme(WeightOnlyScheme):
    def apply(self, layer: Any, x_TI: Activation, add_bias: bool) -> Tensor:
        if not isinstance(layer.weight, ScaledWeight):
            return super().apply(layer, x_TI, add_bias)
        assert isinstance(x_TI, Tensor)
        return scaled_linear(x_TI, layer.weight, layer.bias if add_bias else None)

    def values(self, layer: Any) -> Tensor:
        if not isinstance(layer.weight, ScaledWeight):
            return super().values(layer)
        return layer.weight.values().to(layer.dtype)

    def _weight(self, parameter: UnreadParameter, layer: Any) -> Any:
        (parts,) = quantized_parts(parameter, 1, self._spec, layer.device)
        weight = None if parts is None else scaled_weight(parts)
        return super()._weight(parameter, layer) if weight is None else weight


class BlockScaledExperts(WeightOnlyExperts):
    """Either GEMM is block-scaled, or none is."""

    def finish(self, layer: Any) -> None:
        parts = (layer.gate_up, layer.down)
        weights = [one for part in parts if (one := self._scaled(part.weight, layer)) is not None]
        if len(weights) < len(parts):
            super().finish(layer)
            return
        for part, weight in zip(parts, weights, strict=True):
            del part.weight
            part.weight = weight
            if weight.input_scale_1 is not None:
                largest_of_ranks(weight.input_scale_1, layer)

    def apply(
        self, layer: Any, x_TD: Tensor, slots_TK: Tensor, weights_TK: Tensor, add_bias: bool
    ) -> Tensor:
        if not isinstance(layer.gate_up.weight, ScaledWeight):
            return super().apply(layer, x_TD, slots_TK, weights_TK, add_bias)
        return _apply_experts(layer, x_TD, slots_TK, weights_TK, add_bias)

    def _scaled(self, parameter: UnreadParameter, layer: Any) -> ScaledWeight | None:
        found = []
        for parts in quantized_parts(parameter, layer.num_slots, self._spec, layer.device):
            found.append(None if parts is None else scaled_weight(parts))
            if found[-1] is None:
                break
        return stack_scaled(found)


class BlockScaledMxfp4Experts(Mxfp4Experts):
    """Those of GPT-OSS."""

    def finish(self, layer: Any) -> None:
        for part in (layer.gate_up, layer.down):
            codes_SOB, powers_SOG = part.blocks.detach(), part.scales.detach()
            del part.blocks, part.scales
            part.weight = ScaledWeight(codes_SOB.contiguous(), powers_SOG.contiguous())

    def apply(
        self, layer: Any, x_TD: Tensor, slots_TK: Tensor, weights_TK: Tensor, add_bias: bool
    ) -> Tensor:
        return _apply_experts(layer, x_TD, slots_TK, weights_TK, add_bias)


def _apply_experts(
    layer: Any, x_TD: Tensor, slots_TK: Tensor, weights_TK: Tensor, add_bias: bool
) -> Tensor:
    compute = scaled_experts.reference if layer.by_reference else scaled_experts
    return compute(
        x_TD, slots_TK, weights_TK, layer.gate_up.weight, layer.down.weight,
        layer.gate_up.bias, layer.down.bias if add_bias else None, layer.gate,
    )  # fmt: skip
