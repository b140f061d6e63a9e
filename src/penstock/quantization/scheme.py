"""`LinearScheme`: how the weights of one linear layer are stored and multiplied; `ExpertsScheme`:
those of all experts of a layer.

A layer says which part of the checkpoint's matrices it holds (`LinearShape`, `ExpertsShape`); the
scheme makes the parameters and applies them. Shards, collectives and who adds the bias are the
layer's business.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from penstock.kernels.formats import Activation, InputFormat
from penstock.kernels.gemm.gated import MAX_TOKENS
from penstock.kernels.moe import ExpertWeights, experts
from penstock.parallel.all_to_all import largest
from penstock.parallel.parameter import new_parameter, unread_parameter
from penstock.parallel.shard import Piece, Shard, Span, stack_shards, whole


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearShape:
    """A matrix [outputs, inputs] of this rank; `outputs` has one shard per fused tensor."""

    outputs: tuple[Shard, ...]
    inputs: Shard
    has_bias: bool
    num_padding: int = 0  # rows of zeros behind the others

    @property
    def out_features(self) -> int:
        return sum(shard.target.size for shard in self.outputs) + self.num_padding

    @property
    def in_features(self) -> int:
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
        """silu(gate) * up of the GEMM's output, fused. None: this scheme has no fused kernel."""
        ...

    def values(self, layer: Any) -> Tensor:
        """The matrix of a layer that `finish` saw, as plain numbers in the layer's dtype."""
        ...


class TableScheme(LinearScheme, Protocol):
    """Of matrices whose rows are also looked up: the embedding and a head that may share it."""

    def finish_table(self, layer: Any) -> None:
        """As `finish`, for a layer whose rows are looked up. Another may share its parameter."""
        ...

    def lookup(self, layer: Any, ids_T: Tensor) -> Tensor:
        """Rows of the matrix of a layer that `finish_table` saw."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsShape:
    """Matrices [2 * features, hidden] and [hidden, features] of this rank for each slot."""

    num_experts: int  # of all ranks
    experts: tuple[int, ...]  # of this rank's slots; each of another number
    hidden_size: int
    intermediate_size: int  # of all ranks
    features: Span  # of this one
    has_bias: bool

    @property
    def num_slots(self) -> int:
        return len(self.experts)

    def gate_up_pieces(self) -> tuple[Piece, ...]:
        """Gate and up of expert 0, of expert 1, ...; empty where it is elsewhere."""
        shards = stack_shards([(self.intermediate_size, self.features)] * 2)
        hidden = whole(self.hidden_size)
        return tuple(Piece((at, shard, hidden)) for at in self._slots() for shard in shards)

    def down_pieces(self) -> tuple[Piece, ...]:
        (features,) = stack_shards([(self.intermediate_size, self.features)])
        hidden = whole(self.hidden_size)
        return tuple(Piece((at, hidden, features)) for at in self._slots())

    def _slots(self) -> list[Shard]:
        found = [Shard(full_size=1, source=Span(0, 0), target=Span(0, 0))] * self.num_experts
        for slot, expert in enumerate(self.experts):
            found[expert] = Shard(full_size=1, source=Span(0, 1), target=Span(slot, 1))
        return found


class ExpertsScheme(Protocol):
    """Parameters go to `layer.gate_up` and `layer.down`, as those of a linear layer would."""

    @property
    def group(self) -> int:
        """So many neighboring features share a scale: ranks must not part them."""
        ...

    def create(
        self, layer: Any, shape: ExpertsShape, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Give `layer` its parameters, not yet filled."""
        ...

    def finish(self, layer: Any) -> None:
        """The parameters are filled: bring them into the form that `apply` multiplies with."""
        ...

    def apply(
        self, layer: Any, x_TD: Tensor, slots_TK: Tensor, weights_TK: Tensor, add_bias: bool
    ) -> Tensor:
        """The weighted sum of each token's experts; `add_bias` is about the second GEMM's."""
        ...


def create_unread(layer: Any, shape: LinearShape, dtype: torch.dtype, device: torch.device) -> None:
    """A weight that `finish` reads from its file, and the bias."""
    size = (shape.out_features, shape.in_features)
    layer.weight = unread_parameter(size, matrix_pieces(shape))
    create_bias(layer, shape, dtype, device)


def create_unread_experts(
    layer: Any, shape: ExpertsShape, dtype: torch.dtype, device: torch.device
) -> None:
    """The same of `layer.gate_up` and `layer.down`."""
    size, features = shape.hidden_size, shape.features.size
    layer.gate_up.weight = unread_parameter((2 * features, size), shape.gate_up_pieces())
    layer.down.weight = unread_parameter((size, features), shape.down_pieces())
    create_expert_biases(layer, shape, dtype, device)


def create_expert_biases(
    layer: Any, shape: ExpertsShape, dtype: torch.dtype, device: torch.device
) -> None:
    """`layer.gate_up.bias` and `layer.down.bias`; None where there are none."""
    if not shape.has_bias:
        layer.gate_up.bias = layer.down.bias = None
        return
    num_slots, intermediate_size = shape.num_slots, shape.features.size
    pieces = tuple(Piece(piece.shards[:2]) for piece in shape.gate_up_pieces())
    layer.gate_up.bias = new_parameter((num_slots, 2 * intermediate_size), dtype, device, pieces)
    pieces = tuple(Piece(piece.shards[:2]) for piece in shape.down_pieces())
    layer.down.bias = new_parameter((num_slots, shape.hidden_size), dtype, device, pieces)


def apply_experts(
    layer: Any,
    x_TD: Tensor,
    slots_TK: Tensor,
    weights_TK: Tensor,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    add_bias: bool,
) -> Tensor:
    """As the op does, or as its reference where the layer shall be computed so."""
    compute = experts.reference if layer.by_reference else experts
    down_bias = layer.down.bias if add_bias else None
    return compute(
        x_TD, slots_TK, weights_TK, gate_up, down, layer.gate_up.bias, down_bias, layer.gate
    )


def largest_of_ranks(scale: Tensor, layer: Any) -> None:
    """What was found for the experts of this rank becomes that of all: any may move here."""
    for role in ("tokens", "copies"):
        largest(scale, layer.mesh.role(role))


def fuses_gate(layer: Any, num_tokens: int) -> bool:
    """Small enough M for `gated_linear`, on a device that has it."""
    return num_tokens <= MAX_TOKENS and bool(layer.device.type == "cuda")


def matrix_pieces(shape: LinearShape) -> tuple[Piece, ...]:
    return tuple(Piece((outputs, shape.inputs)) for outputs in shape.outputs)


def create_bias(
    layer: nn.Module, shape: LinearShape, dtype: torch.dtype, device: torch.device
) -> None:
    """Biases are never quantized; `layer.bias` is None where there is none."""
    if not shape.has_bias:
        layer.register_parameter("bias", None)
        return
    pieces = tuple(Piece((outputs,)) for outputs in shape.outputs)
    layer.bias = new_parameter((shape.out_features,), dtype, device, pieces)
