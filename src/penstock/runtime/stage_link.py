"""`StageLink`: hidden states that a step gets from the stage before, and hands to the one behind.

Messages have the tokens that this rank has of the step, never padding. So a stage need not know
whether another one replays a graph, or of which size. They are sent and received outside graphs.
"""

# T tokens of this rank, P with padding, E what comes or goes of each: hidden states of the last
# layer, and of those that a drafter reads

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.layers.decoder import Decoder


class StageLink:
    """Of a model that is one stage: nothing comes and nothing goes."""

    def __init__(self, model: Decoder, max_tokens: int) -> None:
        """`max_tokens`: of a captured step, padding included."""
        self._stage = model.stage
        _, dtype, device = model.hidden_states
        self._size = model.received_size
        num_held = 0 if self._stage.is_first else max_tokens
        self._held_PE = torch.zeros((num_held, self._size), dtype=dtype, device=device)

    def receive(self, num_tokens: int) -> Tensor | None:
        """x_TE; None: this stage begins with token ids."""
        if self._stage.is_first:
            return None
        held = self._held_PE
        return self._stage.receive((num_tokens, self._size), held.dtype, held.device)

    def send(self, x_TE: Tensor) -> None:
        if not self._stage.is_last:
            self._stage.send(x_TE)

    # Of steps as they are captured

    def held(self, num_tokens: int) -> Tensor | None:
        """Where such a step reads what `receive_padded` writes."""
        if self._stage.is_first:
            return None
        assert num_tokens <= len(self._held_PE), (num_tokens, len(self._held_PE))
        return self._held_PE[:num_tokens]

    def receive_padded(self, places: Sequence[slice], num_tokens: int) -> None:
        """`places`: of the step's own tokens among `num_tokens`; the others become zeros."""
        x_TE = self.receive(_count(places))
        if x_TE is None:
            return
        held_PE = self._held_PE[:num_tokens].zero_()
        first = 0
        for place in places:
            size = place.stop - place.start
            held_PE[place] = x_TE[first : first + size]
            first += size

    def send_padded(self, x_PE: Tensor, places: Sequence[slice]) -> None:
        """A copy: the next replay writes there, perhaps before this has been sent."""
        if not self._stage.is_last:
            self._stage.send(torch.cat([x_PE[place] for place in places]))


def _count(places: Sequence[slice]) -> int:
    return sum(place.stop - place.start for place in places)
