"""`SlotTable`: which slots of a layer hold an expert, on the device, where graphs read it."""

# T tokens, K experts of a token, E experts, C most slots of an expert

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class SlotTable(nn.Module):
    def __init__(self, num_experts: int, most_slots: int, device: torch.device) -> None:
        """`most_slots`: that an expert may come to have."""
        super().__init__()
        slots_EC = torch.zeros((num_experts, most_slots), dtype=torch.int32, device=device)
        num_slots_E = torch.ones(num_experts, dtype=torch.int32, device=device)
        self.register_buffer("slots_EC", slots_EC, persistent=False)
        self.register_buffer("num_slots_E", num_slots_E, persistent=False)
        self.slots_EC: Tensor
        self.num_slots_E: Tensor

    def set(self, experts_S: Sequence[int]) -> None:
        """In place: graphs keep the addresses."""
        slots_EC = torch.zeros(self.slots_EC.shape, dtype=torch.int32)
        num_slots_E = torch.zeros(self.num_slots_E.shape, dtype=torch.int32)
        for slot, expert in enumerate(experts_S):
            slots_EC[expert, num_slots_E[expert]] = slot
            num_slots_E[expert] += 1
        self.slots_EC.copy_(slots_EC)
        self.num_slots_E.copy_(num_slots_E)

    def chosen(self, experts_TK: Tensor, first: int) -> Tensor:
        """A slot of each: tokens take turns, of which this rank's begin with number `first`."""
        experts = experts_TK.long()
        turns_T1 = torch.arange(first, first + len(experts), device=experts.device)[:, None]
        turns_TK = turns_T1 % self.num_slots_E[experts]
        return self.slots_EC[experts].gather(2, turns_TK[..., None].long()).squeeze(2)
