"""RMS normalisation, alone and with the residual sum folded in; layer normalisation with it."""

# T tokens in the step, D size of what is normalized

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.kernels.formats import PLAIN, Activation, InputFormat
from penstock.kernels.norm import rms_norm
from penstock.layers.context import LayerContext
from penstock.layers.fused_quant import converted, normed
from penstock.parallel.collectives import all_reduce, all_reduce_add_rms_norm
from penstock.parallel.mesh import RoleGroup
from penstock.parallel.parameter import new_parameter


class RMSNorm(nn.Module):
    """`zero_centered`: the checkpoint has what is added to one. The sum is in fp32: small numbers
    beside a one are lost in a shorter float."""

    def __init__(
        self, size: int, eps: float, build: LayerContext, *, zero_centered: bool = False
    ) -> None:
        super().__init__()
        self.eps, self.zero_centered = eps, zero_centered
        dtype, typical = (torch.float32, (0.0, 0.1)) if zero_centered else (build.dtype, None)
        self.weight = new_parameter((size,), dtype, build.device, typical=typical)

    def finish(self) -> None:
        """After loading: the weight is what is multiplied with."""
        if self.zero_centered:
            self.weight.add_(1.0)

    def forward(self, x_TD: Tensor) -> Tensor:
        return rms_norm(x_TD, self.weight, self.eps)


class ResidualNorm(RMSNorm):
    """Adds a block's output to the residual stream and normalises the sum; returns both.

    The normalized one comes in the form that the layer behind it wants.
    """

    def forward(  # type: ignore[override]
        self,
        x_TD: Tensor,
        residual_TD: Tensor | None,
        wanted: InputFormat = PLAIN,
        summed_over: RoleGroup | None = None,
    ) -> tuple[Activation, Tensor]:
        """`summed_over`: ranks that have parts of the block's output, to be summed here."""
        if summed_over is not None and residual_TD is not None and wanted is PLAIN:
            return all_reduce_add_rms_norm(x_TD, residual_TD, self.weight, self.eps, summed_over)
        if summed_over is not None:
            x_TD = all_reduce(x_TD, summed_over)
        return normed(x_TD, residual_TD, self.weight, self.eps, wanted)


class ResidualLayerNorm(ResidualNorm):
    """The same with the mean subtracted first and a bias added last, in fp32."""

    def __init__(
        self, size: int, eps: float, build: LayerContext, *, zero_centered: bool = False
    ) -> None:
        super().__init__(size, eps, build, zero_centered=zero_centered)
        self.bias = new_parameter((size,), self.weight.dtype, build.device)

    def forward(  # type: ignore[override]
        self,
        x_TD: Tensor,
        residual_TD: Tensor | None,
        wanted: InputFormat = PLAIN,
        summed_over: RoleGroup | None = None,
    ) -> tuple[Activation, Tensor]:
        if summed_over is not None:
            x_TD = all_reduce(x_TD, summed_over)
        sum_TD = x_TD if residual_TD is None else x_TD + residual_TD
        weight_D, bias_D = self.weight.float(), self.bias.float()
        normed_TD = F.layer_norm(sum_TD.float(), weight_D.shape, weight_D, bias_D, self.eps)
        return converted(normed_TD.to(sum_TD.dtype), wanted), sum_TD
