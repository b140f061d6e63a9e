"""Forms in which one layer hands its activations to the next.

A linear layer says which form it multiplies with; norms and activations produce it, so that no
kernel of its own is spent on the change.

Legend: T tokens, D channels.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Plain:
    """The model's own dtype."""


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Static:
    scale_1: Tensor  # float32, from the checkpoint


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """One scale per token, found from its largest value."""


@dataclass(frozen=True, slots=True)
class Fp8Groups:
    """One scale per token and `size` channels."""

    size: int


@dataclass(frozen=True, slots=True, eq=False)
class Int8Static:
    scale_1: Tensor  # float32, from the checkpoint


@dataclass(frozen=True, slots=True)
class Int8Rows:
    """One scale per token, found from its largest value."""


InputFormat = Plain | Fp8Static | Fp8Rows | Fp8Groups | Int8Static | Int8Rows
PLAIN = Plain()


@dataclass(frozen=True, slots=True, eq=False)
class Fp8:
    """A value is `values_TD` times its scale."""

    values_TD: Tensor  # float8_e4m3fn
    scale: Tensor  # float32: [1], [T, 1] or [T, D / size]


@dataclass(frozen=True, slots=True, eq=False)
class Int8:
    """The same of whole numbers."""

    values_TD: Tensor  # int8
    scale: Tensor  # float32: [1] or [T, 1]


Activation = Tensor | Fp8 | Int8
