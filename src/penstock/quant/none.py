"""The scheme of a checkpoint that is not quantised: weights in the model's own dtype."""

from typing import Any

import torch
from torch import Tensor, nn

from penstock.kernels.formats import PLAIN, Activation, InputFormat
from penstock.kernels.gemm import linear, packed
from penstock.parallel.parameter import new_parameter
from penstock.parallel.shard import Piece
from penstock.quant.scheme import LinearShape


class Unquantized:
    def create(
        self, layer: nn.Module, shape: LinearShape, dtype: torch.dtype, device: torch.device
    ) -> None:
        layer.weight = new_parameter(
            (shape.num_outputs, shape.num_inputs),
            dtype,
            device,
            tuple(Piece((outputs, shape.inputs)) for outputs in shape.outputs),
        )
        if shape.has_bias:
            layer.bias = new_parameter(
                (shape.num_outputs,),
                dtype,
                device,
                tuple(Piece((outputs,)) for outputs in shape.outputs),
            )
        else:
            layer.register_parameter("bias", None)

    def finish(self, layer: Any) -> None:
        weight = layer.weight
        del layer.weight
        layer.weight = packed(weight)

    def input_format(self, layer: Any, num_tokens: int) -> InputFormat:
        return PLAIN

    def apply(self, layer: Any, x_TI: Activation, add_bias: bool) -> Tensor:
        assert isinstance(x_TI, Tensor)
        return linear(x_TI, layer.weight, layer.bias if add_bias else None)
