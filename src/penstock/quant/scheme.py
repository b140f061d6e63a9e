"""`LinearScheme`: how the numbers of one linear layer are kept and multiplied.

A layer says which part of the checkpoint's matrix it holds (`LinearShape`); the scheme makes the
parameters and applies them. Shards, collectives and who adds the bias are the layer's business.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from penstock.kernels.formats import Activation, InputFormat
from penstock.kernels.gemm.few import MAX_TOKENS
from penstock.parallel.parameter import new_parameter
from penstock.parallel.shard import Piece, Share


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearShape:
    """A matrix [outputs, inputs] of this rank; `outputs` has one share per fused tensor."""

    outputs: tuple[Share, ...]
    inputs: Share
    has_bias: bool
    num_padding: int = 0  # rows of zeros behind the others

    @property
    def num_outputs(self) -> int:
        return sum(share.target.size for share in self.outputs) + self.num_padding

    @property
    def num_inputs(self) -> int:
        return self.inputs.target.size


class LinearScheme(Protocol):
    def create(
        self, layer: nn.Module, shape: LinearShape, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Give `layer` its parameters, not yet filled."""
        ...

    def finish(self, layer: Any) -> None:
        """The parameters are filled: bring them into the form that `apply` multiplies with."""
        ...

    def input_format(self, layer: Any, num_tokens: int) -> InputFormat:
        """The form in which `apply` wants this many tokens."""
        ...

    def apply(self, layer: Any, x_TI: Activation, add_bias: bool) -> Tensor:
        """x times the matrix of a layer that `create` saw, plus its bias if `add_bias`."""
        ...

    def apply_gated(self, layer: Any, x_TI: Activation, wanted: InputFormat) -> Activation | None:
        """silu(gate) * up of the product. None: no shorter way than one after the other."""
        ...


class TableScheme(LinearScheme, Protocol):
    """Of matrices whose rows are also looked up: the embedding and a head that may share it."""

    def finish_table(self, layer: Any) -> None:
        """As `finish`, for a layer whose rows are looked up. Another may share its parameter."""
        ...

    def lookup(self, layer: Any, ids_T: Tensor) -> Tensor:
        """Rows of the matrix of a layer that `finish_table` saw."""
        ...


def gates_with_product(layer: Any, num_tokens: int) -> bool:
    """Few enough tokens for `gated_linear`, on a device that has it."""
    return num_tokens <= MAX_TOKENS and bool(layer.device.type == "cuda")


def matrix_pieces(shape: LinearShape) -> tuple[Piece, ...]:
    return tuple(Piece((outputs, shape.inputs)) for outputs in shape.outputs)


def create_bias(
    layer: nn.Module, shape: LinearShape, dtype: torch.dtype, device: torch.device
) -> None:
    """Biases are never quantised; `layer.bias` is None where there is none."""
    if not shape.has_bias:
        layer.register_parameter("bias", None)
        return
    pieces = tuple(Piece((outputs,)) for outputs in shape.outputs)
    layer.bias = new_parameter((shape.num_outputs,), dtype, device, pieces)
