"""Weight-only schemes on a CPU: low-bit weights stay packed for the C kernels.

A layer that has unquantized parts, or whose shard of the inputs cuts through a group, is
dequantized to fp32 and treated as an unquantized one.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.kernels.formats import PLAIN, Activation, InputFormat
from penstock.kernels.gemm import (
    CpuPackedWeight,
    linear,
    pack_cpu,
    packed,
    packed_linear,
    packed_rows,
)
from penstock.kernels.moe import activated_experts
from penstock.parallel.parameter import Source, UnreadParameter
from penstock.parallel.shard import Piece
from penstock.quantization.scheme import (
    ExpertsShape,
    LinearShape,
    create_unread,
    create_unread_experts,
)

_CPU = torch.device("cpu")


class CpuWeightOnlyScheme:
    def create(
        self, layer: nn.Module, shape: LinearShape, dtype: torch.dtype, device: torch.device
    ) -> None:
        assert dtype is torch.float32 and device.type == "cpu", (dtype, device)
        create_unread(layer, shape, dtype, device)

    def finish(self, layer: Any) -> None:
        weight = _read(layer.weight)
        del layer.weight
        layer.weight = weight if isinstance(weight, CpuPackedWeight) else packed(weight)

    def input_format(self, layer: Any, num_tokens: int) -> InputFormat:
        return PLAIN

    def apply(self, layer: Any, x_TI: Activation, add_bias: bool) -> Tensor:
        assert isinstance(x_TI, Tensor)
        multiply = packed_linear if type(layer.weight) is CpuPackedWeight else linear
        return multiply(x_TI, layer.weight, layer.bias if add_bias else None)

    def apply_gated(self, layer: Any, x_TI: Activation, wanted: InputFormat) -> Activation | None:
        return None

    def values(self, layer: Any) -> Tensor:
        if type(layer.weight) is CpuPackedWeight:
            return packed_rows(torch.arange(layer.shape.out_features), layer.weight)
        return layer.weight.to_dense() if layer.weight.is_mkldnn else layer.weight

    def finish_table(self, layer: Any) -> None:
        weight = _read(layer.weight)
        del layer.weight
        layer.weight = weight

    def lookup(self, layer: Any, ids_T: Tensor) -> Tensor:
        if type(layer.weight) is CpuPackedWeight:
            return packed_rows(ids_T, layer.weight)
        return F.embedding(ids_T, layer.weight)


class CpuWeightOnlyExperts:
    """Every matrix of every expert for itself."""

    group = 1  # a shard that cuts through one is dequantized

    def create(
        self, layer: Any, shape: ExpertsShape, dtype: torch.dtype, device: torch.device
    ) -> None:
        assert dtype is torch.float32 and device.type == "cpu", (dtype, device)
        create_unread_experts(layer, shape, dtype, device)

    def finish(self, layer: Any) -> None:
        for part in (layer.gate_up, layer.down):
            parameter: UnreadParameter = part.weight
            del part.weight
            weights = []
            for numbers in parameter.numbers_by_slot(layer.num_slots):
                pieces = [Piece(parameter.pieces[n].shards[1:]) for n in numbers]  # without slots
                sources = [parameter.sources[n] for n in numbers]
                weights.append(
                    _matrix(parameter.full_shape, list(zip(pieces, sources, strict=True)))
                )
            part.weight = [
                w if isinstance(w, CpuPackedWeight) or layer.may_move else packed(w)
                for w in weights
            ]

    def apply(
        self, layer: Any, x_TD: Tensor, slots_TK: Tensor, weights_TK: Tensor, add_bias: bool
    ) -> Tensor:
        gate_up, down = layer.gate_up, layer.down
        return activated_experts(
            x_TD, slots_TK, weights_TK, gate_up.weight, down.weight, gate_up.bias,
            down.bias if add_bias else None, layer.gate,
        )  # fmt: skip


def _read(parameter: UnreadParameter) -> CpuPackedWeight | Tensor:
    """Once for all who share the parameter."""
    if parameter.matrix is None:
        parts = [(p, parameter.sources[number]) for number, p in enumerate(parameter.pieces)]
        parameter.matrix = _matrix(parameter.full_shape, parts)
    return parameter.matrix


def _matrix(
    shape: tuple[int, int], parts: Sequence[tuple[Piece, Source]]
) -> CpuPackedWeight | Tensor:
    """Packed, or plain where that is not possible."""
    return _packed(shape, parts) or _plain(shape, parts)


def _packed(
    shape: tuple[int, int], parts: Sequence[tuple[Piece, Source]]
) -> CpuPackedWeight | None:
    found = []
    for piece, source in parts:
        weight = None if piece.is_empty else source.read_quantized(piece.source, _CPU)
        if weight is None:
            return None
        found.append(weight)
    return pack_cpu(found, shape[0])


def _plain(shape: tuple[int, int], parts: Sequence[tuple[Piece, Source]]) -> Tensor:
    matrix = torch.zeros(shape)
    for piece, source in parts:
        if not piece.is_empty:
            matrix[piece.target] = source.read(piece.source)
    return matrix
