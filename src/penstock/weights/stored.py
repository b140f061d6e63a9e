"""`StoredTensor`: a tensor that still lies in its file, or one of those that are stacked there."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock.kernels.quantized_weight import QuantizedWeight
from penstock.weights.mapping import Pair, Unfuse, Unstack

_FLOATS = ("F64", "F32", "F16", "BF16", "F8_E8M0")  # the last: powers of two, for scales
_OF_INPUTS = (".input_scale", ".pre_quant_scale")  # which all rows of a matrix share
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


@dataclass(frozen=True, slots=True)
class _Rows:
    """Some rows of a tensor, in some order; those of a part must lie together."""

    whole: Slices
    rows: Tensor  # int64

    def __getitem__(self, part: tuple[slice, ...]) -> Tensor:
        wanted, near = self._near(part[0])
        return self.whole[(wanted, *part[1:])][near]

    def quantized(self, part: tuple[slice, ...], device: torch.device) -> QuantizedWeight | None:
        if not isinstance(self.whole, QuantizedSlices):
            return None
        wanted, near = self._near(part[0])
        found = self.whole.quantized((wanted, *part[1:]), device)
        return None if found is None else found.rows(near.to(device))

    def _near(self, part: slice) -> tuple[slice, Tensor]:
        """The rows to be read, and which of them are the part's."""
        rows = self.rows[part]
        first = int(rows.min())
        return slice(first, int(rows.max()) + 1), rows - first


def unfused(tensor: StoredTensor, rule: Unfuse) -> Iterator[tuple[str, StoredTensor]]:
    """The tensors that `rule` finds in `tensor`. A scale of all of it is that of each; one of
    blocks is taken apart where whole blocks are."""
    num_rows, total = (tensor.shape or (1,))[0], sum(rule.sizes)
    sizes = rule.sizes
    if math.prod(tensor.shape) == 1 or tensor.name.endswith(_OF_INPUTS):
        sizes = (0,) * len(sizes)
    elif num_rows != total:
        per_row = -(-total // num_rows)
        if any(size % per_row for size in sizes):
            yield tensor.name, tensor  # nothing waits for a tensor of this name
            return
        sizes = tuple(size // per_row for size in sizes)
    start = 0
    for part, size in enumerate(sizes):
        found = tensor
        if size:
            rows = torch.arange(start, start + size)
            found = StoredTensor(
                f"{tensor.name}[{start}:{start + size}]",
                (size, *tensor.shape[1:]),
                tensor.dtype,
                tensor.num_bytes * size // num_rows,
                _Rows(tensor._slices, rows),
            )
        yield rule.member(tensor.name, part), found
        start += size


def paired(tensor: StoredTensor, rule: Pair) -> StoredTensor:
    """`tensor` with its rows in the order of `rule`. A scale of whole heads stays as it is."""
    num_rows = rule.num_heads * rule.head_size
    num_scales = (tensor.shape or (1,))[0]
    if tensor.name.endswith(_OF_INPUTS):
        return tensor
    if num_scales != num_rows:
        if num_rows // num_scales % rule.head_size:
            raise ConfigError(
                f"'{tensor.name}' has a scale for parts of a head of {rule.head_size}, whose "
                "channels are rotated as neighbors; this is not supported"
            )
        return tensor
    heads = torch.arange(num_rows).view(-1, rule.head_size)
    pairs, others = heads.split((rule.num_rotated, rule.head_size - rule.num_rotated), dim=1)
    rows = torch.cat((pairs[:, ::2], pairs[:, 1::2], others), dim=1).flatten()
    return StoredTensor(
        tensor.name, tensor.shape, tensor.dtype, tensor.num_bytes, _Rows(tensor._slices, rows)
    )


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
