"""`StageLink`: hidden states that a step gets from the stage before, and hands to the one behind.

Messages have the tokens that this rank has of the step, never padding. So a stage need not know
whether another one replays a graph, or of which size. They are sent and received outside graphs.
"""

# T tokens of this rank, P with padding, D hidden size

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.layers.decoder import Decoder


class StageLink:
    """Of a model that is one stage: nothing comes and nothing goes."""

    def __init__(self, model: Decoder, max_tokens: int) -> None:
        """`max_tokens`: of a captured step, padding included."""
        self._stage = model.stage
        self._size, dtype, device = model.hidden_states
        num_held = 0 if self._stage.is_first else max_tokens
        self._held_PD = torch.zeros((num_held, self._size), dtype=dtype, device=device)

    def receive(self, num_tokens: int) -> Tensor | None:
        """x_TD; None: this stage begins with token ids."""
        if self._stage.is_first:
            return None
        held = self._held_PD
        return self._stage.receive((num_tokens, self._size), held.dtype, held.device)

    def send(self, x_TD: Tensor) -> None:
        if not self._stage.is_last:
            self._stage.send(x_TD)

    # Of steps as they are captured

    def held(self, num_tokens: int) -> Tensor | None:
        """Where such a step reads what `receive_padded` writes."""
        if self._stage.is_first:
            return None
        assert num_tokens <= len(self._held_PD), (num_tokens, len(self._held_PD))
        return self._held_PD[:num_tokens]

    def receive_padded(self, places: Sequence[slice], num_tokens: int) -> None:
        """`places`: of the step's own tokens among `num_tokens`; the others become zeros."""
        x_TD = self.receive(_count(places))
        if x_TD is None:
            return
        held_PD = self._held_PD[:num_tokens].zero_()
        first = 0
        for place in places:
            size = place.stop - place.start
            held_PD[place] = x_TD[first : first + size]
            first += size

    def send_padded(self, x_PD: Tensor, places: Sequence[slice]) -> None:
        """A copy: the next replay writes there, perhaps before this has been sent."""
        if not self._stage.is_last:
            self._stage.send(torch.cat([x_PD[place] for place in places]))


def _count(places: Sequence[slice]) -> int:
    return sum(place.stop - place.start for place in places)
