"""What ranks of a role do together. Each is the identity where the role has no process group."""

# T tokens of this rank, S tokens of all ranks, P most tokens of a rank, R ranks, D hidden size

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from penstock.kernels.norm import add_rms_norm
from penstock.parallel.mesh import RoleGroup

# Newer names, whose older ones warn.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def largest(numbers: Sequence[float], num_ranks: int, device: torch.device) -> list[float]:
    """Each number's largest, over all ranks of the engine. It waits for them: never in a step."""
    if num_ranks == 1:
        return list(numbers)
    found = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.tolist()


def gathered(message: bytes, num_ranks: int, device: torch.device) -> list[bytes]:
    """The messages of all ranks of the engine. It waits for them: never in a step."""
    if num_ranks == 1:
        return [message]
    lengths = torch.zeros(num_ranks, dtype=torch.int64, device=device)
    _gather(lengths, torch.tensor([len(message)], device=device))
    most = int(lengths.max())
    padded = torch.frombuffer(bytearray(message.ljust(most)), dtype=torch.uint8).to(device)
    found = torch.empty(num_ranks * most, dtype=torch.uint8, device=device)
    _gather(found, padded)
    parts = zip(found.split(most), lengths.tolist(), strict=True)
    return [bytes(part[:length].tolist()) for part, length in parts]


def _is_alone(role: RoleGroup) -> bool:
    assert role.group is not None or role.size == 1, f"{role.size} ranks have not met"
    return role.group is None


def all_reduce(x: Tensor, role: RoleGroup) -> Tensor:
    """Sum over the ranks; `x` itself may be overwritten and returned."""
    if role.one_shot is not None and role.one_shot.fits(x):
        return role.one_shot.all_reduce(x)
    if not _is_alone(role):
        dist.all_reduce(x, group=role.group)
    return x


def all_reduce_add_rms_norm(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, role: RoleGroup
) -> tuple[Tensor, Tensor]:
    """`add_rms_norm` of the sum over the ranks."""
    if role.one_shot is not None and role.one_shot.fits(x_TD):
        return role.one_shot.all_reduce_add_rms_norm(x_TD, residual_TD, weight_D, eps)
    return add_rms_norm(all_reduce(x_TD, role), residual_TD, weight_D, eps)


def all_gather(x: Tensor, role: RoleGroup) -> Tensor:
    """Every rank's `x`, contiguous, joined along the last dimension in rank order."""
    if _is_alone(role):
        return x
    parts = [torch.empty_like(x) for _ in range(role.size)]
    dist.all_gather(parts, x, group=role.group)
    return torch.cat(parts, dim=-1)


def broadcast(x: Tensor, role: RoleGroup) -> Tensor:
    """The first rank's `x` on every rank; elsewhere `x` is overwritten and returned."""
    if not _is_alone(role):
        dist.broadcast(x, group=role.group, group_src=0)
    return x


def gather_tokens(x_TD: Tensor, role: RoleGroup, counts_R: Sequence[int] | None) -> Tensor:
    """The tokens of all ranks in rank order, rank r has `counts_R[r]`; None: as many as this one.

    What is sent is padded to the most of them, since every rank sends as much.
    """
    if _is_alone(role):
        return x_TD
    most = _most(x_TD, role, counts_R)
    gathered_RPD = x_TD.new_empty(role.size, most, x_TD.shape[1])
    _gather(gathered_RPD.flatten(0, 1), _padded(x_TD, most), group=role.group)
    if _is_even(counts_R):
        return gathered_RPD.flatten(0, 1)
    assert counts_R is not None
    return torch.cat([x_PD[:num] for x_PD, num in zip(gathered_RPD, counts_R, strict=True)])


def gather_packed(
    parts: Sequence[Tensor], role: RoleGroup, counts_R: Sequence[int] | None
) -> list[Tensor]:
    """The same of several tensors [T, ...] of the same tokens, of any dtypes, in one message."""
    if _is_alone(role):
        return list(parts)
    as_bytes = [part.flatten(1).view(torch.uint8) for part in parts]
    gathered = gather_tokens(torch.cat(as_bytes, dim=1), role, counts_R)
    by_part = gathered.split([own.shape[1] for own in as_bytes], dim=1)
    return [
        own.contiguous().view(part.dtype).unflatten(1, part.shape[1:])
        for own, part in zip(by_part, parts, strict=True)
    ]


def gather_blocks(blocks_B: Tensor, role: RoleGroup, out_XB: Tensor) -> None:
    """`out` becomes the blocks of all ranks, rank after rank; all have as many."""
    _gather(out_XB.view(torch.uint8), blocks_B.view(torch.uint8), group=role.group)


def scatter_sums(y_SD: Tensor, role: RoleGroup, counts_R: Sequence[int] | None) -> Tensor:
    """The way back: the sum over the ranks, of this rank's own tokens."""
    if _is_alone(role):
        return y_SD
    if _is_even(counts_R):
        sent_SD, num_own = y_SD, y_SD.shape[0] // role.size
    else:
        assert counts_R is not None
        most, num_own = max(counts_R), counts_R[role.rank]
        sent_SD = torch.cat([_padded(y_TD, most) for y_TD in y_SD.split(list(counts_R))])
    sum_PD = y_SD.new_empty(sent_SD.shape[0] // role.size, y_SD.shape[1])
    _reduce_scatter(sum_PD, sent_SD.contiguous(), group=role.group)
    return sum_PD[:num_own]


def _most(x_TD: Tensor, role: RoleGroup, counts_R: Sequence[int] | None) -> int:
    if counts_R is None:
        return x_TD.shape[0]
    assert counts_R[role.rank] == x_TD.shape[0], (counts_R, role.rank, x_TD.shape)
    return max(counts_R)


def _is_even(counts_R: Sequence[int] | None) -> bool:
    return counts_R is None or len(set(counts_R)) == 1


def _padded(x_TD: Tensor, num_tokens: int) -> Tensor:
    missing = num_tokens - x_TD.shape[0]
    return pad(x_TD, (0, 0, 0, missing)) if missing else x_TD.contiguous()
