"""The meaning of low-rank adapters: each token adds the product of its own two thin matrices.

A layer has S slots, each of which holds one adapter; a token names its slot. Matrices that are
fused in the layer (query, key and value) are parts with adapters of their own.

Legend: T tokens, I inputs, O outputs, S slots, P parts of the outputs, R largest rank, N tokens
that come alone, G of them in a group.
"""

import torch
from torch import Tensor

from penstock.kernels.op import cpu, op


@op(gpu_module="penstock.kernels.lora.triton")
def lora_groups(slots_N: Tensor, size: int) -> Tensor:
    """int32 [N, size]: tokens of one slot that a kernel reads its matrices for once. Row n begins
    with n and goes on with the next tokens of its slot; -1 fills it up. All of it is -1 where a row
    before it has n, or n has no slot."""
    num_tokens = slots_N.shape[0]
    is_same_NN = (slots_N[:, None] == slots_N[None, :]) & (slots_N >= 0)[:, None]
    # How many of the same slot come before; those of a group follow each other in this count.
    place_N = is_same_NN.tril(-1).sum(1)
    is_first_N = (place_N % size == 0) & (slots_N >= 0)
    tokens_N = torch.arange(num_tokens, device=slots_N.device)
    columns = []
    for offset in range(size):
        is_it_NN = is_same_NN & (place_N[None, :] == place_N[:, None] + offset)
        found_N = torch.where(is_it_NN, tokens_N, -1).amax(1) if num_tokens else tokens_N
        columns.append(torch.where(is_first_N, found_N, -1))
    return torch.stack(columns, 1).int()


@op(gpu_module="penstock.kernels.lora.triton")
def lora(
    x_TI: Tensor,
    y_TO: Tensor,
    a_SPRI: Tensor,
    b_SRO: Tensor,
    ranks_SP: Tensor,
    slots_T: Tensor,
    part_sizes: tuple[int, ...],
    groups_NG: Tensor | None,
) -> None:
    """y[t, o] += sum over r of (a[s, p, r] . x[t]) * b[s, r, o] for s = slots[t], where o is in
    part p and r < ranks[s, p]; the sum in fp32. Slot -1: nothing.

    Part p is the next `part_sizes[p]` outputs. `groups_NG`: of the first N slots, by `lora_groups`;
    neighbors among the tokens behind mostly have the same slot. Both are hints, for speed.
    """
    size = a_SPRI.shape[2]
    x32_TI = x_TI.float()
    is_used_SPR = torch.arange(size, device=x_TI.device) < ranks_SP[:, :, None]
    delta_TO = torch.zeros(y_TO.shape, dtype=torch.float32, device=y_TO.device)
    for slot in range(a_SPRI.shape[0]):
        inner_TPR = torch.einsum("ti,pri->tpr", x32_TI, a_SPRI[slot].float())
        inner_TPR = torch.where(is_used_SPR[slot], inner_TPR, 0.0)
        b_RO = b_SRO[slot].float()
        start = 0
        for part, width in enumerate(part_sizes):
            columns = slice(start, start + width)
            b_RW = torch.where(is_used_SPR[slot, part, :, None], b_RO[:, columns], 0.0)
            own_TW = inner_TPR[:, part] @ b_RW
            delta_TO[:, columns] += torch.where((slots_T == slot)[:, None], own_TW, 0.0)
            start += width
    y_TO.copy_(y_TO.float() + delta_TO)


@lora.impl("cpu", needs=cpu())
def lora_cpu(x, y, a, b, ranks, slots, part_sizes, groups):
    """The tokens of each slot that has any, together, and of its rank alone."""
    for slot in set(slots.tolist()) - {-1}:
        tokens = (slots == slot).nonzero()[:, 0]
        x32 = x[tokens].float()
        delta = torch.zeros(len(tokens), y.shape[1])
        start = 0
        for part, (width, rank) in enumerate(zip(part_sizes, ranks[slot].tolist(), strict=True)):
            if rank:
                columns = slice(start, start + width)
                inner = x32 @ a[slot, part, :rank].float().T
                delta[:, columns] = inner @ b[slot, :rank, columns].float()
            start += width
        y[tokens] = (y[tokens].float() + delta).to(y.dtype)
