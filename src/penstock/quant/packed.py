"""The scheme of a checkpoint whose weights are small codes, multiplied as they are on a CPU.

A layer that has parts without codes, or whose share of the inputs cuts through a group, is unpacked
to fp32 and treated as an unquantised one.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.kernels.formats import PLAIN, Activation, InputFormat
from penstock.kernels.gemm import PackedWeight, linear, pack, packed, packed_linear, packed_rows
from penstock.parallel.parameter import UnreadParameter, unread_parameter
from penstock.quant.scheme import LinearShape, create_bias, matrix_pieces


class PackedCodes:
    def create(
        self, layer: nn.Module, shape: LinearShape, dtype: torch.dtype, device: torch.device
    ) -> None:
        assert dtype is torch.float32 and device.type == "cpu", (dtype, device)
        size = (shape.num_outputs, shape.num_inputs)
        layer.weight = unread_parameter(size, matrix_pieces(shape))
        create_bias(layer, shape, dtype, device)

    def finish(self, layer: Any) -> None:
        weight = _read(layer.weight)
        del layer.weight
        layer.weight = weight if isinstance(weight, PackedWeight) else packed(weight)

    def input_format(self, layer: Any, num_tokens: int) -> InputFormat:
        return PLAIN

    def apply(self, layer: Any, x_TI: Activation, add_bias: bool) -> Tensor:
        assert isinstance(x_TI, Tensor)
        multiply = packed_linear if type(layer.weight) is PackedWeight else linear
        return multiply(x_TI, layer.weight, layer.bias if add_bias else None)

    def apply_gated(self, layer: Any, x_TI: Activation, wanted: InputFormat) -> Activation | None:
        return None

    def finish_table(self, layer: Any) -> None:
        weight = _read(layer.weight)
        del layer.weight
        layer.weight = weight

    def lookup(self, layer: Any, ids_T: Tensor) -> Tensor:
        if type(layer.weight) is PackedWeight:
            return packed_rows(ids_T, layer.weight)
        return F.embedding(ids_T, layer.weight)


def _read(parameter: UnreadParameter) -> PackedWeight | Tensor:
    """Packed, or plain where that is not possible; once for all who share the parameter."""
    if parameter.matrix is None:
        parameter.matrix = _packed(parameter) or _plain(parameter)
    return parameter.matrix


def _packed(parameter: UnreadParameter) -> PackedWeight | None:
    parts = []
    for part, piece in enumerate(parameter.pieces):
        codes = None if piece.is_empty else parameter.sources[part].read_codes(piece.source)
        if codes is None:
            return None
        parts.append(codes)
    return pack(parts, parameter.full_shape[0])


def _plain(parameter: UnreadParameter) -> Tensor:
    matrix = torch.zeros(parameter.full_shape)
    for part, piece in enumerate(parameter.pieces):
        if not piece.is_empty:
            matrix[piece.target] = parameter.sources[part].read(piece.source)
    return matrix
