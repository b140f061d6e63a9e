"""`LinearScheme`: how the numbers of one linear layer are kept and multiplied.

A layer says which part of the checkpoint's matrix it holds (`LinearShape`); the scheme makes the
parameters and applies them. Shards, collectives and who adds the bias are the layer's business.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from penstock.kernels.formats import Activation, InputFormat
from penstock.parallel.shard import Share


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearShape:
    """A matrix [outputs, inputs] of this rank; `outputs` has one share per fused tensor."""

    outputs: tuple[Share, ...]
    inputs: Share
    has_bias: bool

    @property
    def num_outputs(self) -> int:
        return sum(share.target.size for share in self.outputs)

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
