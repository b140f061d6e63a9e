"""Number formats of activations between layers: plain, FP8 or INT8 with their scales.

A linear layer says which format its GEMM takes; norms and activations produce it (fused
quantization), so that no kernel of its own is spent on it.

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
    """As `Fp8`, in INT8."""

    values_TD: Tensor  # int8
    scale: Tensor  # float32: [1] or [T, 1]


Activation = Tensor | Fp8 | Int8


def num_rows(x: Activation) -> int:
    return x.shape[0] if isinstance(x, Tensor) else x.values_TD.shape[0]
