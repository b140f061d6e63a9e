"""Weight-only schemes on a GPU (W4A16, W8A16): weights stay packed, activations stay plain.

A layer whose parts cannot be packed as one (one of them is not quantized, their inputs are in
different orders, a rank's shard cuts through a group) is dequantized.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from penstock.kernels.formats import PLAIN, Activation, InputFormat
from penstock.kernels.gemm import linear, packed
from penstock.kernels.gemm.wna16 import weight_only_linear
from penstock.kernels.gemm.wna16_packing import GpuPackedWeight, pack_gpu, stack_packed, unpack_gpu
from penstock.kernels.moe import activated_experts
from penstock.kernels.moe.wna16 import weight_only_experts
from penstock.kernels.quantized_weight import (
    NF4_GROUP,
    Kind,
    QuantizedWeight,
    quantize_int8_weight,
    quantize_nf4,
    random_quantized,
)
from penstock.parallel.parameter import UnreadParameter
from penstock.quantization.scheme import (
    ExpertsShape,
    LinearShape,
    create_unread,
    create_unread_experts,
)
from penstock.quantization.unquantized import UnquantizedExperts
from penstock.quantization.w8a8 import W8A8Experts
from penstock.types.model_spec import W8A8Spec, WeightOnlySpec


class WeightOnlyScheme:
    """`spec`: the checkpoint's layout; None: its weights are plain, and quantized online to NF4.
    `has_kernel`: a kernel reads packed weights; else they are dequantized while loading."""

    def __init__(self, spec: WeightOnlySpec | None, has_kernel: bool) -> None:
        self._spec, self._has_kernel = spec, has_kernel

    def create(
        self, layer: nn.Module, shape: LinearShape, dtype: torch.dtype, device: torch.device
    ) -> None:
        create_unread(layer, shape, dtype, device)

    def finish(self, layer: Any) -> None:
        parameter: UnreadParameter = layer.weight
        del layer.weight
        weight = self._weight(parameter, layer)
        layer.weight = packed(self._plain(parameter, layer)) if weight is None else weight

    def input_format(self, layer: Any, num_tokens: int) -> InputFormat:
        return PLAIN

    def apply(self, layer: Any, x_TI: Activation, add_bias: bool) -> Tensor:
        assert isinstance(x_TI, Tensor)
        multiply = weight_only_linear if type(layer.weight) is GpuPackedWeight else linear
        return multiply(x_TI, layer.weight, layer.bias if add_bias else None)

    def apply_gated(self, layer: Any, x_TI: Activation, wanted: InputFormat) -> Activation | None:
        return None

    def values(self, layer: Any) -> Tensor:
        if type(layer.weight) is GpuPackedWeight:
            return unpack_gpu(layer.weight).values().to(layer.dtype)
        return layer.weight.to_dense() if layer.weight.is_mkldnn else layer.weight

    def _weight(self, parameter: UnreadParameter, layer: Any) -> GpuPackedWeight | None:
        """None where it shall not or cannot be packed."""
        if not self._has_kernel:
            return None
        return next(_packed_matrices(parameter, 1, self._spec, layer.dtype, layer.device))

    def _plain(self, parameter: UnreadParameter, layer: Any) -> Tensor:
        numbers = parameter.numbers(layer.dtype, layer.device)
        if self._spec is None and (quantized := quantize_nf4(numbers)) is not None:
            return quantized.values().to(layer.dtype)
        return numbers


class WeightOnlyExperts(UnquantizedExperts):
    """As `WeightOnlyScheme`. `online`: the format to quantize to where there is no `spec`."""

    def __init__(self, spec: WeightOnlySpec | None, has_kernel: bool, online: str = "nf4") -> None:
        self._spec, self._has_kernel, self._online = spec, has_kernel, online
        if spec is not None:
            self.group = spec.group or 1
        elif online == "nf4":
            self.group = NF4_GROUP

    def create(
        self, layer: Any, shape: ExpertsShape, dtype: torch.dtype, device: torch.device
    ) -> None:
        create_unread_experts(layer, shape, dtype, device)

    def finish(self, layer: Any) -> None:
        parts = (layer.gate_up, layer.down)
        parameters: list[UnreadParameter] = [part.weight for part in parts]
        weights = [self._weight(parameter, layer) for parameter in parameters]
        for part, parameter, weight in zip(parts, parameters, weights, strict=True):
            del part.weight
            if None not in weights:
                part.weight = weight
                continue
            numbers = parameter.matrices(layer.num_slots, layer.dtype, layer.device)
            part.weight = torch.stack([self._rounded(matrix) for matrix in numbers])
        if None in weights:
            super().finish(layer)

    def apply(
        self, layer: Any, x_TD: Tensor, slots_TK: Tensor, weights_TK: Tensor, add_bias: bool
    ) -> Tensor:
        if not isinstance(layer.gate_up.weight, GpuPackedWeight):
            return super().apply(layer, x_TD, slots_TK, weights_TK, add_bias)
        return _apply_experts(layer, x_TD, slots_TK, weights_TK, add_bias)

    def _weight(self, parameter: UnreadParameter, layer: Any) -> GpuPackedWeight | None:
        if not self._has_kernel:
            return None
        found = []
        arguments = layer.num_slots, self._spec, layer.dtype, layer.device, self._online
        for weight in _packed_matrices(parameter, *arguments):
            if weight is None:
                return None
            found.append(weight)
        return stack_packed(found)

    def _rounded(self, matrix: Tensor) -> Tensor:
        quantized = _quantize_online(matrix, self._online) if self._spec is None else None
        return matrix if quantized is None else quantized.values().to(matrix.dtype)


class Int8Experts(W8A8Experts):
    """INT8 experts, weight-only whatever the checkpoint says: that is no less precise, and small M
    is bound by reading the weights alone."""

    def __init__(self, spec: W8A8Spec, has_kernel: bool) -> None:
        super().__init__(spec)
        self._has_kernel = has_kernel

    def finish(self, layer: Any) -> None:
        for part in (layer.gate_up, layer.down):
            weight_SOI, scale_SO, _ = self._loaded(layer, part)
            quantized = [
                QuantizedWeight("int8", values_OI.view(torch.uint8) ^ 128, scale_O[:, None])
                for values_OI, scale_O in zip(weight_SOI, scale_SO, strict=True)
            ]
            if self._has_kernel:
                weights = [weight for one in quantized if (weight := pack_gpu([one])) is not None]
                part.weight = stack_packed(weights)
                assert part.weight is not None and len(weights) == len(quantized)
            else:
                values = [one.values().to(layer.dtype) for one in quantized]
                part.weight = values if layer.may_move else [packed(one) for one in values]

    def apply(
        self, layer: Any, x_TD: Tensor, slots_TK: Tensor, weights_TK: Tensor, add_bias: bool
    ) -> Tensor:
        if isinstance(layer.gate_up.weight, GpuPackedWeight):
            return _apply_experts(layer, x_TD, slots_TK, weights_TK, add_bias)
        return activated_experts(
            x_TD, slots_TK, weights_TK, layer.gate_up.weight, layer.down.weight,
            layer.gate_up.bias, layer.down.bias if add_bias else None, layer.gate,
        )  # fmt: skip


def _apply_experts(
    layer: Any, x_TD: Tensor, slots_TK: Tensor, weights_TK: Tensor, add_bias: bool
) -> Tensor:
    compute = weight_only_experts.reference if layer.by_reference else weight_only_experts
    return compute(
        x_TD, slots_TK, weights_TK, layer.gate_up.weight, layer.down.weight, layer.gate_up.bias,
        layer.down.bias if add_bias else None, layer.gate,
    )  # fmt: skip


def _packed_matrices(
    parameter: UnreadParameter,
    num_slots: int,
    spec: WeightOnlySpec | None,
    dtype: torch.dtype,
    device: torch.device,
    online: str = "nf4",
) -> Iterator[GpuPackedWeight | None]:
    """One for each slot; None where a matrix cannot be packed."""
    if spec is None:
        for matrix in parameter.matrices(num_slots, dtype, device):
            quantized = _quantize_online(matrix, online)
            yield None if quantized is None else pack_gpu([quantized])
        return
    keeps_zeros = spec.has_zeros and num_slots > 1  # all slots must have them, or none
    for parts in quantized_parts(parameter, num_slots, spec, device):
        yield None if parts is None else pack_gpu(parts, keeps_zeros)


def quantized_parts(
    parameter: UnreadParameter, num_slots: int, spec: WeightOnlySpec | None, device: torch.device
) -> Iterator[list[QuantizedWeight] | None]:
    """What makes up the matrix of each slot; None where not all of it is quantized so."""
    assert spec is not None
    for numbers in parameter.numbers_by_slot(num_slots):
        if not parameter.sources:
            yield [_random(spec, *parameter.full_shape, device)]
            continue
        parts = [
            parameter.sources[number].read_quantized(parameter.pieces[number].source[-2:], device)
            for number in numbers
        ]
        found = [part for part in parts if part is not None]
        yield found if len(found) == len(numbers) else None


def _quantize_online(matrix: Tensor, online: str) -> QuantizedWeight | None:
    return quantize_nf4(matrix) if online == "nf4" else quantize_int8_weight(matrix)


def _random(
    spec: WeightOnlySpec, out_features: int, in_features: int, device: torch.device
) -> QuantizedWeight:
    kind: Kind = "int8" if spec.bits == 8 else "int4"
    match spec.layout, spec.bits:
        case "nvfp4" | "mxfp4", _:
            kind = "fp4"
        case "bitsandbytes", 4:
            kind = "nf4"
        case "fp8", _:
            kind = "e4m3"
    group = spec.group or in_features
    weight = random_quantized(kind, out_features, in_features, group, spec.has_zeros, device)
    if spec.inputs in ("nvfp4", "fp8"):
        # Of activations around one.
        largest = 448 * (6 if spec.inputs == "nvfp4" else 1)
        return replace(weight, input_scale=torch.tensor(16 / largest, device=device))
    if spec.layout == "mxfp4":
        assert weight.outer_O is not None
        power = weight.outer_O[0].log2().round().exp2()
        return replace(weight, scales_OG=weight.scales_OG.float() * power, outer_O=None)
    return weight
