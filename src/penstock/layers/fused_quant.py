"""Between two linear layers: norm, gate or nothing, in the form that the second one wants."""

# T tokens in the step, D channels, F features of a gated MLP

from torch import Tensor

from penstock.kernels.activation import gelu_mul, silu_mul
from penstock.kernels.formats import (
    PLAIN,
    Activation,
    Fp8,
    Fp8Groups,
    Fp8Rows,
    Fp8Static,
    InputFormat,
    Int8,
    Int8Rows,
    Int8Static,
    Plain,
)
from penstock.kernels.norm import add_rms_norm, rms_norm
from penstock.kernels.quantize import quantize_fp8, rms_norm_fp8, silu_mul_fp8
from penstock.kernels.quantize.reference import quantize_int8


def normed(
    x_TD: Tensor, residual_TD: Tensor | None, weight_D: Tensor, eps: float, wanted: InputFormat
) -> tuple[Activation, Tensor]:
    """(norm(sum), sum) for sum = x + residual; without a residual, x is the stream's beginning."""
    match wanted:
        case Plain():
            if residual_TD is None:
                return rms_norm(x_TD, weight_D, eps), x_TD
            return add_rms_norm(x_TD, residual_TD, weight_D, eps)
        case Int8Rows() | Int8Static():
            normed_TD, sum_TD = normed(x_TD, residual_TD, weight_D, eps, PLAIN)
            assert isinstance(normed_TD, Tensor)
            return converted(normed_TD, wanted), sum_TD
    values_TD, scale, sum_TD = rms_norm_fp8(x_TD, residual_TD, weight_D, eps, *_scaling(wanted))
    return Fp8(values_TD, scale), sum_TD


def gated(x_T2F: Tensor, wanted: InputFormat, activation: str = "silu") -> Activation:
    """silu(gate) * up, or the same of another activation."""
    if activation == "gelu_pytorch_tanh":
        return converted(gelu_mul(x_T2F), wanted)
    match wanted:
        case Plain():
            return silu_mul(x_T2F)
        case Int8Rows() | Int8Static():
            return converted(silu_mul(x_T2F), wanted)
    return Fp8(*silu_mul_fp8(x_T2F, *_scaling(wanted)))


def converted(x_TD: Tensor, wanted: InputFormat) -> Activation:
    match wanted:
        case Plain():
            return x_TD
        case Int8Rows():
            return Int8(*quantize_int8(x_TD, None))
        case Int8Static(scale_1):
            return Int8(*quantize_int8(x_TD, scale_1))
    return Fp8(*quantize_fp8(x_TD, *_scaling(wanted)))


def _scaling(wanted: InputFormat) -> tuple[Tensor | None, int]:
    """The scale and the group size that the FP8 ops take."""
    match wanted:
        case Fp8Static(scale_1):
            return scale_1, 0
        case Fp8Rows():
            return None, 0
        case Fp8Groups(size):
            return None, size
    raise AssertionError(wanted)
