"""The schemes of weights of few bits on a GPU: kept as codes, multiplied with plain inputs.

Parts of a layer that have no codes in common form (one of them is not quantised, their inputs are
in different orders, a rank's share cuts through a group) make it a layer of plain numbers.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from penstock.kernels.coded import (
    Coded,
    CodedWeight,
    Kind,
    coded_experts,
    coded_linear,
    int8_coded,
    nf4_coded,
    pack_coded,
    random_coded,
    stack_coded,
    unpack_coded,
)
from penstock.kernels.coded.weights import NF4_GROUP
from penstock.kernels.formats import PLAIN, Activation, InputFormat
from penstock.kernels.gemm import linear, packed
from penstock.kernels.moe import touched_experts
from penstock.parallel.parameter import UnreadParameter
from penstock.quant.eight_bits import EightBitExperts
from penstock.quant.none import UnquantizedExperts
from penstock.quant.scheme import (
    ExpertsShape,
    LinearShape,
    create_unread,
    create_unread_experts,
)
from penstock.types.model_spec import CodesSpec, EightBitSpec


class CodedScheme:
    """`spec`: what the checkpoint has; None: its weights are plain, and become nf4.
    `keeps_codes`: there is a kernel that multiplies them; else they are unpacked while loading."""

    def __init__(self, spec: CodesSpec | None, keeps_codes: bool) -> None:
        self._spec, self._keeps_codes = spec, keeps_codes

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
        multiply = coded_linear if type(layer.weight) is CodedWeight else linear
        return multiply(x_TI, layer.weight, layer.bias if add_bias else None)

    def apply_gated(self, layer: Any, x_TI: Activation, wanted: InputFormat) -> Activation | None:
        return None

    def values(self, layer: Any) -> Tensor:
        if type(layer.weight) is CodedWeight:
            return unpack_coded(layer.weight).values().to(layer.dtype)
        return layer.weight.to_dense() if layer.weight.is_mkldnn else layer.weight

    def _weight(self, parameter: UnreadParameter, layer: Any) -> CodedWeight | None:
        """None where it shall not or cannot be packed."""
        if not self._keeps_codes:
            return None
        return next(_packed_matrices(parameter, 1, self._spec, layer.dtype, layer.device))

    def _plain(self, parameter: UnreadParameter, layer: Any) -> Tensor:
        numbers = parameter.numbers(layer.dtype, layer.device)
        if self._spec is None and (coded := nf4_coded(numbers)) is not None:
            return coded.values().to(layer.dtype)
        return numbers


class CodedExperts(UnquantizedExperts):
    """As `CodedScheme`. `made`: what plain weights become where there is no `spec`."""

    def __init__(self, spec: CodesSpec | None, keeps_codes: bool, made: str = "nf4") -> None:
        self._spec, self._keeps_codes, self._made = spec, keeps_codes, made
        if spec is not None:
            self.group = spec.group or 1
        elif made == "nf4":
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
        if not isinstance(layer.gate_up.weight, CodedWeight):
            return super().apply(layer, x_TD, slots_TK, weights_TK, add_bias)
        return _apply_experts(layer, x_TD, slots_TK, weights_TK, add_bias)

    def _weight(self, parameter: UnreadParameter, layer: Any) -> CodedWeight | None:
        if not self._keeps_codes:
            return None
        found = []
        arguments = layer.num_slots, self._spec, layer.dtype, layer.device, self._made
        for weight in _packed_matrices(parameter, *arguments):
            if weight is None:
                return None
            found.append(weight)
        return stack_coded(found)

    def _rounded(self, matrix: Tensor) -> Tensor:
        coded = _made(matrix, self._made) if self._spec is None else None
        return matrix if coded is None else coded.values().to(matrix.dtype)


class Int8Experts(EightBitExperts):
    """Experts of whole numbers of 8 bits. Their inputs stay plain, whatever the checkpoint says:
    that is no less precise, and few tokens wait for the weights alone."""

    def __init__(self, spec: EightBitSpec, keeps_codes: bool) -> None:
        super().__init__(spec)
        self._keeps_codes = keeps_codes

    def finish(self, layer: Any) -> None:
        for part in (layer.gate_up, layer.down):
            weight_SOI, scale_SO, _ = self._loaded(part)
            coded = [
                Coded("int8", values_OI.view(torch.uint8) ^ 128, scale_O[:, None])
                for values_OI, scale_O in zip(weight_SOI, scale_SO, strict=True)
            ]
            if self._keeps_codes:
                weights = [weight for one in coded if (weight := pack_coded([one])) is not None]
                part.weight = stack_coded(weights)
                assert part.weight is not None and len(weights) == len(coded)
            else:
                part.weight = [packed(one.values().to(layer.dtype)) for one in coded]

    def apply(
        self, layer: Any, x_TD: Tensor, slots_TK: Tensor, weights_TK: Tensor, add_bias: bool
    ) -> Tensor:
        if isinstance(layer.gate_up.weight, CodedWeight):
            return _apply_experts(layer, x_TD, slots_TK, weights_TK, add_bias)
        return touched_experts(
            x_TD, slots_TK, weights_TK, layer.gate_up.weight, layer.down.weight,
            layer.gate_up.bias, layer.down.bias if add_bias else None, layer.gate,
        )  # fmt: skip


def _apply_experts(
    layer: Any, x_TD: Tensor, slots_TK: Tensor, weights_TK: Tensor, add_bias: bool
) -> Tensor:
    compute = coded_experts.reference if layer.by_reference else coded_experts
    return compute(
        x_TD, slots_TK, weights_TK, layer.gate_up.weight, layer.down.weight, layer.gate_up.bias,
        layer.down.bias if add_bias else None, layer.gate,
    )  # fmt: skip


def _packed_matrices(
    parameter: UnreadParameter,
    num_slots: int,
    spec: CodesSpec | None,
    dtype: torch.dtype,
    device: torch.device,
    made: str = "nf4",
) -> Iterator[CodedWeight | None]:
    """One for each slot; None where a matrix cannot be packed."""
    if spec is None:
        for matrix in parameter.matrices(num_slots, dtype, device):
            coded = _made(matrix, made)
            yield None if coded is None else pack_coded([coded])
        return
    keeps_zeros = spec.has_zeros and num_slots > 1  # all slots must have them, or none
    for numbers in parameter.numbers_by_slot(num_slots):
        if not parameter.sources:
            yield pack_coded([_random(spec, *parameter.full_shape, device)], keeps_zeros)
            continue
        parts = [
            parameter.sources[number].read_coded(parameter.pieces[number].source[-2:], device)
            for number in numbers
        ]
        coded_parts = [part for part in parts if part is not None]
        is_coded = len(coded_parts) == len(numbers)
        yield pack_coded(coded_parts, keeps_zeros) if is_coded else None


def _made(matrix: Tensor, made: str) -> Coded | None:
    return nf4_coded(matrix) if made == "nf4" else int8_coded(matrix)


def _random(spec: CodesSpec, num_outputs: int, num_inputs: int, device: torch.device) -> Coded:
    kind: Kind = "int8" if spec.bits == 8 else "int4"
    match spec.layout, spec.bits:
        case "nvfp4" | "mxfp4", _:
            kind = "fp4"
        case "bitsandbytes", 4:
            kind = "nf4"
        case "fp8", _:
            kind = "e4m3"
    group = spec.group or num_inputs
    return random_coded(kind, num_outputs, num_inputs, group, spec.has_zeros, device)
