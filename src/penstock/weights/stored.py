"""`StoredTensor`: a tensor that still lies in its file."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from penstock.kernels.gemm import Codes

_FLOATS = ("F64", "F32", "F16", "BF16")
_FP8 = "F8_E4M3"


class Slices(Protocol):
    def __getitem__(self, part: tuple[slice, ...]) -> Tensor: ...


@runtime_checkable
class CodedSlices(Slices, Protocol):
    def codes(self, part: tuple[slice, ...]) -> Codes | None: ...


@dataclass(frozen=True, slots=True)
class StoredTensor:
    name: str
    shape: tuple[int, ...]
    dtype: str  # as safetensors writes it: "BF16"
    num_bytes: int  # in the file
    _slices: Slices

    def fits(self, dtype: torch.dtype) -> bool:
        """Whether a parameter of `dtype` may be filled with it: floats are rounded, codes never."""
        return self.dtype == _FP8 if dtype == torch.float8_e4m3fn else self.dtype in _FLOATS

    def read(self, part: tuple[slice, ...]) -> Tensor:
        """May be a view into the mapped file: copy it before the stream moves on."""
        return self._slices[part]

    def read_codes(self, part: tuple[slice, ...]) -> Codes | None:
        """The same without unpacking; None where there are no codes or `part` cuts through them."""
        return self._slices.codes(part) if isinstance(self._slices, CodedSlices) else None
