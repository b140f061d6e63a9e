"""Messages of different size between the ranks of a role, also none at all."""

# R ranks, M messages to all of them, N from all of them

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.parallel.mesh import RoleGroup

_all_to_all = dist.all_to_all_single
_peer_to_peer = dist.batch_isend_irecv


def exchanged_counts(counts_R: Tensor, role: RoleGroup) -> tuple[list[int], list[int]]:
    """(how many go to each rank, how many come from each), on the host, which waits for them."""
    received_R = torch.empty_like(counts_R)
    _all_to_all(received_R, counts_R, group=role.group)
    sent, received = torch.stack((counts_R, received_R)).tolist()
    return sent, received


def exchanged(
    x_MD: Tensor, sent_R: Sequence[int], received_R: Sequence[int], role: RoleGroup
) -> Tensor:
    """Rows of `x_MD` go to the ranks in order; those that come, in the order of their ranks."""
    y_ND = x_MD.new_empty(sum(received_R), x_MD.shape[1])
    _all_to_all(y_ND, x_MD.contiguous(), list(received_R), list(sent_R), group=role.group)
    return y_ND


def largest(x: Tensor, role: RoleGroup) -> Tensor:
    """Of every rank's; `x` itself is overwritten and returned."""
    if role.group is not None:
        dist.all_reduce(x, op=dist.ReduceOp.MAX, group=role.group)
    return x


def swapped(
    sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], role: RoleGroup
) -> None:
    """Send to ranks, and receive from ranks into tensors; returns when the tensors may be used.
    What goes from one rank to another has one order on both. Bytes are sent, of any dtype."""
    ops = [
        dist.P2POp(send, x.view(torch.uint8), group=role.group, group_peer=rank)
        for send, messages in ((dist.isend, sends), (dist.irecv, receives))
        for rank, x in messages
    ]
    for request in _peer_to_peer(ops) if ops else ():
        request.wait()
