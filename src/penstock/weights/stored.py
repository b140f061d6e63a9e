"""`StoredTensor`: a tensor that still lies in its file, or one of those that are stacked there."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from penstock.kernels.quantized_weight import QuantizedWeight
from penstock.weights.mapping import Unstack

_FLOATS = ("F64", "F32", "F16", "BF16", "F8_E8M0")  # the last: powers of two, for scales
_CODES = {torch.float8_e4m3fn: "F8_E4M3", torch.uint8: "U8", torch.int8: "I8"}


class Slices(Protocol):
    def __getitem__(self, part: tuple[slice, ...]) -> Tensor: ...


@runtime_checkable
class QuantizedSlices(Slices, Protocol):
    def quantized(
        self, part: tuple[slice, ...], device: torch.device
    ) -> QuantizedWeight | None: ...


@dataclass(frozen=True, slots=True)
class StoredTensor:
    name: str
    shape: tuple[int, ...]
    dtype: str  # as safetensors writes it: "BF16"
    num_bytes: int  # in the file
    _slices: Slices

    def fits(self, dtype: torch.dtype) -> bool:
        """Whether a parameter of `dtype` may be filled with it: floats are rounded, codes never."""
        return self.dtype in wanted_dtypes(dtype)

    def read(self, part: tuple[slice, ...]) -> Tensor:
        """May be a view into the mapped file: copy it before the stream moves on."""
        return self._slices[part]

    def read_quantized(
        self, part: tuple[slice, ...], device: torch.device
    ) -> QuantizedWeight | None:
        """The same without dequantizing, on `device`; None where it is not quantized, or where
        `part` cuts through groups."""
        if not isinstance(self._slices, QuantizedSlices):
            return None
        return self._slices.quantized(part, device)


def wanted_dtypes(dtype: torch.dtype) -> tuple[str, ...]:
    """What may fill a parameter of `dtype`, as safetensors writes it."""
    return (_CODES[dtype],) if dtype in _CODES else _FLOATS


@dataclass(frozen=True, slots=True)
class _Member:
    """Some rows of matrix `number`. No others are read but those in between."""

    stack: Slices
    number: int
    rows: range
    before_rows: tuple[slice, ...]  # dimensions of a matrix, where rows are the last one

    def __getitem__(self, part: tuple[slice, ...]) -> Tensor:
        rows = self.rows[part[0]]
        place = (slice(self.number, self.number + 1), *self.before_rows)
        stored = self.stack[(*place, slice(rows.start, rows.stop))][0]
        found = stored.movedim(-1, 0) if self.before_rows else stored
        found = found.flatten(1) if found.dim() > 2 else found
        return found[:: rows.step][(slice(None), *part[1:])]


def unstacked(tensor: StoredTensor, rule: Unstack) -> Iterator[tuple[str, StoredTensor]]:
    """The tensors that `rule` finds in `tensor`, each with the name it would have of its own."""
    if len(tensor.shape) < 2 + rule.is_transposed:
        yield tensor.name, tensor  # no stack: nothing waits for a tensor of this name
        return
    num_members, *row = tensor.shape
    num_rows = row.pop(-1 if rule.is_transposed else 0)
    columns = (math.prod(row),) if row else ()
    before_rows = (slice(None),) * len(row) if rule.is_transposed else ()
    num_parts = len(rule.parts)
    for number in range(num_members):
        for part in range(num_parts):
            rows = range(part * num_rows // num_parts, (part + 1) * num_rows // num_parts)
            if rule.takes_turns:
                rows = range(part, num_rows, num_parts)
            yield (
                rule.member(tensor.name, number, part),
                StoredTensor(
                    f"{tensor.name}[{number}]",
                    (len(rows), *columns),
                    tensor.dtype,
                    tensor.num_bytes // (num_members * num_parts),
                    _Member(tensor._slices, number, rows, before_rows),
                ),
            )
