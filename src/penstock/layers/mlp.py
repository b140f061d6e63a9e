"""Feed-forward blocks: down(act(gate(x)) * up(x)) with SiLU or GELU, or down(relu(up(x))^2).

Each gives this rank's part of the sum; `TokenExchange` sums.
"""

# T tokens of all ranks that share it, D hidden size

import torch
from torch import Tensor, nn

from penstock.kernels.formats import Activation, InputFormat, num_rows
from penstock.kernels.forward_batch import ForwardBatch
from penstock.layers.context import LayerContext
from penstock.layers.fused_quant import converted
from penstock.layers.linear import ColumnLinear, RowLinear


class GatedMLP(nn.Module):
    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool,
        build: LayerContext,
        activation: str = "silu",
    ) -> None:
        super().__init__()
        self.activation = activation
        self.gate_up_proj = ColumnLinear(
            hidden_size, (intermediate_size, intermediate_size), role="mlp", bias=bias, build=build
        )
        self.down_proj = RowLinear(
            intermediate_size, hidden_size, role="mlp", bias=bias, build=build, is_summed=False
        )

    def input_format(self, num_tokens: int) -> InputFormat:
        return self.gate_up_proj.input_format(num_tokens)

    def forward(self, x_TD: Activation, batch: ForwardBatch) -> Tensor:
        wanted = self.down_proj.input_format(num_rows(x_TD))
        return self.down_proj(self.gate_up_proj.gated(x_TD, wanted, batch, self.activation), batch)


class SquaredReluMLP(nn.Module):
    def __init__(
        self, hidden_size: int, intermediate_size: int, *, bias: bool, build: LayerContext
    ) -> None:
        super().__init__()
        self.up_proj = ColumnLinear(
            hidden_size, (intermediate_size,), role="mlp", bias=bias, build=build
        )
        self.down_proj = RowLinear(
            intermediate_size, hidden_size, role="mlp", bias=bias, build=build, is_summed=False
        )

    def input_format(self, num_tokens: int) -> InputFormat:
        return self.up_proj.input_format(num_tokens)

    def forward(self, x_TD: Activation, batch: ForwardBatch) -> Tensor:
        wanted = self.down_proj.input_format(num_rows(x_TD))
        y_TF = torch.relu(self.up_proj(x_TD, batch)).square()
        return self.down_proj(converted(y_TF, wanted), batch)
