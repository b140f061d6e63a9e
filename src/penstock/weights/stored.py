"""`StoredTensor`: a tensor that still lies in its file."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

_FLOATS = ("F64", "F32", "F16", "BF16")


class Slices(Protocol):
    def __getitem__(self, part: tuple[slice, ...]) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class StoredTensor:
    name: str
    shape: tuple[int, ...]
    dtype: str  # as safetensors writes it: "BF16"
    num_bytes: int  # in the file
    _slices: Slices

    @property
    def is_float(self) -> bool:
        return self.dtype in _FLOATS

    def read(self, part: tuple[slice, ...]) -> Tensor:
        """May be a view into the mapped file: copy it before the stream moves on."""
        return self._slices[part]
