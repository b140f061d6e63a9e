"""`Stage`: the layers of this rank, and the ranks that have those before and behind them.

A step goes through the stages as plan and hidden states: every rank gets the plan, the hidden
states of its tokens come from the stage before.
"""

# T tokens in the step, D hidden size, E what a stage sends of each token

from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.parallel.mesh import RankMesh
from penstock.types.mesh import stage_layers

_MAX_SENDING = 16  # messages that may be under way; a stage has fewer steps in flight


class Elsewhere(nn.Module):
    """In the place of a layer that another stage has: nothing happens here."""

    def forward(self, x_TD: Tensor, residual_TD: Tensor | None, _: object) -> tuple[Tensor, object]:
        return x_TD, residual_TD


def is_elsewhere(model: object, parameter: str) -> bool:
    """Whether a parameter of the whole model is another stage's."""
    for name in parameter.split("."):
        model = getattr(model, name, None)
        if isinstance(model, Elsewhere):
            return True
    return False


class Stage:
    def __init__(self, mesh: RankMesh, num_layers: int) -> None:
        number, line = mesh.coordinate("pp"), mesh.shape.group(("pp",), mesh.rank)
        self.layers = stage_layers(num_layers, mesh.shape.pp)[number]
        self.is_first, self.is_last = number == 0, number == mesh.shape.pp - 1
        self._before, self._behind = line[number - 1], line[(number + 1) % len(line)]
        self._sending: deque[tuple[dist.Work | None, Tensor]] = deque()

    def send(self, x_TE: Tensor) -> None:
        """To the stage behind; it is not waited for."""
        x_TE = x_TE.contiguous()
        if len(self._sending) == _MAX_SENDING:
            work, _ = self._sending.popleft()
            if work is not None:
                work.wait()
        self._sending.append((dist.isend(x_TE, self._behind), x_TE))

    def receive(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """From the stage before; on a CPU this waits until it comes."""
        x_TE = torch.empty(shape, dtype=dtype, device=device)
        dist.recv(x_TE, self._before)
        return x_TE
