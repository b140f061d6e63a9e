"""The scheme of unquantized layers: weights in the model's dtype."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.kernels.formats import PLAIN, Activation, InputFormat, Plain
from penstock.kernels.gemm import gated_linear, linear, packed
from penstock.kernels.moe import activated_experts, plain_weights
from penstock.parallel.parameter import new_parameter
from penstock.quantization.scheme import (
    ExpertsShape,
    LinearShape,
    apply_experts,
    create_bias,
    create_expert_biases,
    fuses_gate,
    matrix_pieces,
)


class Unquantized:
    def create(
        self, layer: nn.Module, shape: LinearShape, dtype: torch.dtype, device: torch.device
    ) -> None:
        layer.weight = new_parameter(
            (shape.out_features, shape.in_features),
            dtype,
            device,
            matrix_pieces(shape),
        )
        layer.weight.data[shape.out_features - shape.num_padding :].zero_()
        create_bias(layer, shape, dtype, device)

    def finish(self, layer: Any) -> None:
        weight = layer.weight
        del layer.weight
        layer.weight = packed(weight)

    def input_format(self, layer: Any, num_tokens: int) -> InputFormat:
        return PLAIN

    def apply(self, layer: Any, x_TI: Activation, add_bias: bool) -> Tensor:
        assert isinstance(x_TI, Tensor)
        return linear(x_TI, layer.weight, layer.bias if add_bias else None)

    def apply_gated(self, layer: Any, x_TI: Activation, wanted: InputFormat) -> Activation | None:
        assert isinstance(x_TI, Tensor)
        if not isinstance(wanted, Plain) or not fuses_gate(layer, x_TI.shape[0]):
            return None
        return gated_linear(x_TI, None, layer.weight, None, layer.bias, x_TI.dtype, None)

    def values(self, layer: Any) -> Tensor:
        return layer.weight.to_dense() if layer.weight.is_mkldnn else layer.weight

    def finish_table(self, layer: Any) -> None:
        """Packed rows could not be looked up; a head with the same table packs a copy."""

    def lookup(self, layer: Any, ids_T: Tensor) -> Tensor:
        return F.embedding(ids_T, layer.weight)


class UnquantizedExperts:
    """Stacked, except on a CPU, where each matrix that stays is packed for itself."""

    group = 1

    def create(
        self, layer: Any, shape: ExpertsShape, dtype: torch.dtype, device: torch.device
    ) -> None:
        num_slots, size, features = shape.num_slots, shape.hidden_size, shape.features.size
        layer.gate_up.weight = new_parameter(
            (num_slots, 2 * features, size), dtype, device, shape.gate_up_pieces()
        )
        layer.down.weight = new_parameter(
            (num_slots, size, features), dtype, device, shape.down_pieces()
        )
        create_expert_biases(layer, shape, dtype, device)

    def finish(self, layer: Any) -> None:
        for part in (layer.gate_up, layer.down):
            weight = part.weight.detach()
            del part.weight
            is_packed = weight.device.type == "cpu" and not layer.by_reference
            is_packed = is_packed and not layer.may_move
            part.weight = [packed(matrix) for matrix in weight] if is_packed else weight

    def apply(
        self, layer: Any, x_TD: Tensor, slots_TK: Tensor, weights_TK: Tensor, add_bias: bool
    ) -> Tensor:
        gate_up, down = layer.gate_up, layer.down
        if not isinstance(gate_up.weight, list):
            matrices = (
                plain_weights(gate_up.weight, layer.has_all),
                plain_weights(down.weight, layer.has_all),
            )
            return apply_experts(layer, x_TD, slots_TK, weights_TK, *matrices, add_bias)
        return activated_experts(
            x_TD, slots_TK, weights_TK, gate_up.weight, down.weight, gate_up.bias,
            down.bias if add_bias else None, layer.gate,
        )  # fmt: skip
