"""Parameters that know which checkpoint tensors fill them. Made by layers, filled by `weights/`."""

import math
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor, nn

from penstock.kernels.gemm import CpuPackedWeight
from penstock.kernels.quantized_weight import QuantizedWeight
from penstock.parallel.shard import Piece, whole


class PlacedParameter(nn.Parameter):
    """`pieces[i]` says what the i-th fused checkpoint tensor contributes, and where it lands."""

    pieces: tuple[Piece, ...]
    default: float | None  # where the checkpoint has no such tensor; None: it must
    typical: tuple[float, float] | None  # mean and spread of random values; None: by shape

    @property
    def num_bytes(self) -> int:
        return self.numel() * self.element_size()


class Source(Protocol):
    """A checkpoint tensor that still lies in its file."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def num_bytes(self) -> int: ...
    def read(self, part: tuple[slice, ...]) -> Tensor: ...
    def read_quantized(
        self, part: tuple[slice, ...], device: torch.device
    ) -> QuantizedWeight | None: ...


class UnreadParameter(PlacedParameter):
    """Is given the tensors themselves, by part; the scheme that made it reads them as it likes."""

    full_shape: tuple[int, int]  # of the matrix that they make up
    sources: dict[int, Source]
    matrix: CpuPackedWeight | Tensor | None  # what was read, for all who share the parameter

    @property
    def num_bytes(self) -> int:
        """As stored, of this rank's shard."""
        return sum(
            source.num_bytes * self.pieces[part].num_values // math.prod(source.shape)
            for part, source in self.sources.items()
        )

    def numbers(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The whole matrix, plain."""
        (matrix,) = self.matrices(1, dtype, device)
        return matrix

    def matrices(
        self, num_slots: int, dtype: torch.dtype, device: torch.device
    ) -> Iterator[Tensor]:
        """One for each slot, plain; random ones where nothing was loaded."""
        for numbers in self.numbers_by_slot(num_slots):
            matrix = torch.zeros(self.full_shape, dtype=dtype, device=device)
            if not self.sources:
                matrix.normal_(0.0, 1 / math.sqrt(self.full_shape[1]))
            for number in numbers if self.sources else ():
                piece = Piece(self.pieces[number].shards[-2:])  # without the slot
                matrix[piece.target] = self.sources[number].read(piece.source).to(device, dtype)
            yield matrix

    def numbers_by_slot(self, num_slots: int) -> list[list[int]]:
        """Which pieces make up the matrix of each slot; empty ones are left out."""
        held = [number for number, piece in enumerate(self.pieces) if not piece.is_empty]
        held.sort(key=lambda number: self.pieces[number].shards[0].target.start)
        per_slot = len(held) // num_slots
        return [held[first : first + per_slot] for first in range(0, len(held), per_slot)]


def new_parameter(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    pieces: tuple[Piece, ...] | None = None,
    *,
    default: float | None = None,
    typical: tuple[float, float] | None = None,
) -> PlacedParameter:
    """Not yet filled; without `pieces` one checkpoint tensor of the same shape fills all of it."""
    empty = torch.empty(shape, dtype=dtype, device=device)
    parameter = PlacedParameter(empty, requires_grad=False)
    parameter.pieces = pieces or (Piece(tuple(whole(size) for size in shape)),)
    parameter.default, parameter.typical = default, typical
    return parameter


def unread_parameter(shape: tuple[int, int], pieces: tuple[Piece, ...]) -> UnreadParameter:
    """Holds no numbers, only what loading finds for `pieces`."""
    parameter = UnreadParameter(torch.empty(0), requires_grad=False)
    parameter.full_shape, parameter.pieces = shape, pieces
    parameter.default = parameter.typical = None
    parameter.sources, parameter.matrix = {}, None
    return parameter
