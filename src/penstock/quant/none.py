"""The scheme of a checkpoint that is not quantised: weights in the model's own dtype."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.kernels.formats import PLAIN, Activation, InputFormat, Plain
from penstock.kernels.gemm import gated_linear, linear, packed
from penstock.parallel.parameter import new_parameter
from penstock.quant.scheme import LinearShape, create_bias, gates_with_product, matrix_pieces


class Unquantized:
    def create(
        self, layer: nn.Module, shape: LinearShape, dtype: torch.dtype, device: torch.device
    ) -> None:
        layer.weight = new_parameter(
            (shape.num_outputs, shape.num_inputs),
            dtype,
            device,
            matrix_pieces(shape),
        )
        layer.weight.data[shape.num_outputs - shape.num_padding :].zero_()
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
        if not isinstance(wanted, Plain) or not gates_with_product(layer, x_TI.shape[0]):
            return None
        return gated_linear(x_TI, None, layer.weight, None, layer.bias, x_TI.dtype, None)

    def finish_table(self, layer: Any) -> None:
        """Packed rows could not be looked up; a head with the same table packs a copy."""

    def lookup(self, layer: Any, ids_T: Tensor) -> Tensor:
        return F.embedding(ids_T, layer.weight)
