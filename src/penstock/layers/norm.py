"""RMS normalisation, alone and with the residual sum folded in."""

# T tokens in the step, D size of what is normalised

from torch import Tensor, nn

from penstock.kernels.formats import PLAIN, Activation, InputFormat
from penstock.kernels.norm import rms_norm
from penstock.layers.build import Build
from penstock.layers.handover import normed
from penstock.parallel.parameter import new_parameter


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float, build: Build) -> None:
        super().__init__()
        self.eps = eps
        self.weight = new_parameter((size,), build.dtype, build.device)

    def forward(self, x_TD: Tensor) -> Tensor:
        return rms_norm(x_TD, self.weight, self.eps)


class ResidualNorm(RMSNorm):
    """Adds a block's output to the residual stream and normalises the sum; returns both.

    The normalised one comes in the form that the layer behind it wants.
    """

    def forward(  # type: ignore[override]
        self, x_TD: Tensor, residual_TD: Tensor | None, wanted: InputFormat = PLAIN
    ) -> tuple[Activation, Tensor]:
        return normed(x_TD, residual_TD, self.weight, self.eps, wanted)
