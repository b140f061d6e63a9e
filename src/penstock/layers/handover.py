"""Between two linear layers: norm, gate or nothing, in the form that the second one wants."""

# T tokens in the step, D channels, F features of a gated MLP

from torch import Tensor

from penstock.kernels.activation import silu_mul
from penstock.kernels.formats import Activation, InputFormat, Plain
from penstock.kernels.norm import add_rms_norm, rms_norm


def normed(
    x_TD: Tensor, residual_TD: Tensor | None, weight_D: Tensor, eps: float, wanted: InputFormat
) -> tuple[Activation, Tensor]:
    """(norm(sum), sum) for sum = x + residual; without a residual, x is the stream's beginning."""
    match wanted:
        case Plain():
            if residual_TD is None:
                return rms_norm(x_TD, weight_D, eps), x_TD
            return add_rms_norm(x_TD, residual_TD, weight_D, eps)
    raise AssertionError(wanted)


def gated(x_T2F: Tensor, wanted: InputFormat) -> Activation:
    """silu(gate) * up."""
    match wanted:
        case Plain():
            return silu_mul(x_T2F)
    raise AssertionError(wanted)


def converted(x_TD: Tensor, wanted: InputFormat) -> Activation:
    match wanted:
        case Plain():
            return x_TD
    raise AssertionError(wanted)
