"""Parameters that know which checkpoint tensors fill them. Made by layers, filled by `weights/`."""

import torch
from torch import nn

from penstock.parallel.shard import Piece, whole


class PlacedParameter(nn.Parameter):
    """`pieces[i]` says what the i-th fused checkpoint tensor contributes, and where it lands."""

    pieces: tuple[Piece, ...]


def new_parameter(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    pieces: tuple[Piece, ...] | None = None,
) -> PlacedParameter:
    """Not yet filled; without `pieces` one checkpoint tensor of the same shape fills all of it."""
    empty = torch.empty(shape, dtype=dtype, device=device)
    parameter = PlacedParameter(empty, requires_grad=False)
    parameter.pieces = pieces or (Piece(tuple(whole(size) for size in shape)),)
    return parameter
