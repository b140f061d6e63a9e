"""`LoraSlots`: the low-rank adapters of one linear layer, as its post-op.

A layer has room for as many adapters as there are slots; which tokens take which slot comes with
the batch. The matrices are sharded as the layer's own: a row layer's sum adds up theirs, too.
"""

# I inputs, O outputs of this rank, S slots, P parts of the outputs, R largest rank

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.forward_batch import ForwardBatch
from penstock.kernels.lora import lora
from penstock.layers.linear import Linear
from penstock.quantization.scheme import LinearShape

_MIN_RANK = 16  # of a tile on tensor cores


@dataclass(frozen=True, slots=True)
class LoraPair:
    """What is added to one part of a layer is b^T a; its scale is in b."""

    a_RI: Tensor
    b_RO: Tensor

    @property
    def rank(self) -> int:
        return self.a_RI.shape[0]

    @property
    def num_bytes(self) -> int:
        return self.a_RI.nbytes + self.b_RO.nbytes


class LoraSlots:
    def __init__(
        self,
        shape: LinearShape,
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.part_sizes = tuple(shard.target.size for shard in shape.outputs)
        size = 1 << (max(max_rank, _MIN_RANK) - 1).bit_length()
        num_parts = len(self.part_sizes)
        self.a_SPRI = torch.zeros(
            (num_slots, num_parts, size, shape.in_features), dtype=dtype, device=device
        )
        self.b_SRO = torch.zeros((num_slots, size, shape.out_features), dtype=dtype, device=device)
        self.ranks_SP = torch.zeros((num_slots, num_parts), dtype=torch.int32, device=device)

    @property
    def num_bytes(self) -> int:
        return self.a_SPRI.nbytes + self.b_SRO.nbytes

    def load(self, slot: int, parts: Sequence[LoraPair | None]) -> None:
        """An adapter takes the slot; None: it leaves that part as it is. Does not wait for the
        device where the pairs are in pinned memory."""
        start = 0
        for part, (width, pair) in enumerate(zip(self.part_sizes, parts, strict=True)):
            if pair is not None:
                self.a_SPRI[slot, part, : pair.rank].copy_(pair.a_RI, non_blocking=True)
                columns = slice(start, start + width)
                self.b_SRO[slot, : pair.rank, columns].copy_(pair.b_RO, non_blocking=True)
            start += width
            self.ranks_SP[slot, part] = 0 if pair is None else pair.rank

    def spoil(self, slot: int) -> None:
        """Nobody may take what lies there: outputs become NaN, which ends their requests."""
        self.b_SRO[slot].fill_(torch.nan)
        self.a_SPRI[slot].fill_(torch.nan)
        self.ranks_SP[slot] = 1

    def __call__(self, x_TI: Tensor, y_TO: Tensor, batch: ForwardBatch) -> Tensor:
        assert batch.adapters is not None
        lora(
            x_TI,
            y_TO,
            self.a_SPRI,
            self.b_SRO,
            self.ranks_SP,
            batch.adapters.slots_T,
            self.part_sizes,
            batch.adapters.groups_NG,
        )
        return y_TO


def adapted(batch: ForwardBatch) -> bool:
    """Whether the step has a token with an adapter."""
    return batch.adapters is not None


def add_slots(layer: Linear, num_slots: int, max_rank: int) -> LoraSlots:
    """Make room for adapters at a layer."""
    slots = LoraSlots(layer.shape, num_slots, max_rank, layer.dtype, layer.device)
    layer.post_op, layer.has_post_op = slots, adapted
    return slots
