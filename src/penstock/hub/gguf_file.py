"""GGUF files: one file with configuration, tokenizer and weights. Reads the head, maps the rest.

Knows the container alone. What its fields mean for a model is in `models/gguf_config.py`, for a
tokenizer in `text/gguf_tokenizer.py`; how numbers are packed is the `gguf` package's business.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError
from penstock.hub.files import require_regular

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SUFFIX = ".gguf"

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_COUNT = 1 << 20  # of fields and of tensors
_MAX_DIMS = 4
_MAX_DEPTH = 8  # of arrays in arrays; known files have none
_MAX_ITEMS = 1 << 24  # of an array; a vocabulary has some 10^5
_ALIGNMENT = 8  # what every alignment is a multiple of
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}


def is_gguf(path: Path) -> bool:
    return path.suffix == SUFFIX and path.is_file()


@dataclass(frozen=True, slots=True)
class GgufTensor:
    name: str
    shape: tuple[int, ...]  # rows first, as torch writes it
    type: int  # how the numbers are packed
    offset: int  # in the file


class GgufFile:
    def __init__(self, path: Path) -> None:
        self.path = path
        require_regular(path)
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._read_head()
        except (OSError, struct.error, ValueError) as error:
            raise ConfigError(
                f"'{path}' is not a readable GGUF file: {error}; fetch it again, or convert it anew"
            ) from error

    def _read_head(self) -> None:
        head = _Reader(self._map)
        if head.take(4) != _MAGIC or (version := head.number("I")) not in _VERSIONS:
            raise ValueError("no GGUF magic, or a version other than 2 and 3")
        self.version = version
        num_tensors, num_fields = head.count(), head.count()
        self.metadata: dict[str, Any] = {}
        for _ in range(num_fields):
            name = head.text()
            self.metadata[name] = head.value(head.number("I"))
        tensors = [self._read_tensor(head) for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment % _ALIGNMENT:
            raise ValueError(f"general.alignment is {alignment!r:.60}, no multiple of {_ALIGNMENT}")
        base = -(-head.at // alignment) * alignment
        self.tensors = {
            name: GgufTensor(name, shape, kind, base + offset)
            for name, shape, kind, offset in tensors
        }

    @staticmethod
    def _read_tensor(head: "_Reader") -> tuple[str, tuple[int, ...], int, int]:
        name = head.text()
        num_dims = head.number("I")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise ValueError(f"tensor '{name}' has {num_dims} dimensions")
        shape = tuple(head.number("Q") for _ in range(num_dims))[::-1]
        return name, shape, head.number("I"), head.number("Q")

    @cached_property
    def _bytes(self) -> "NDArray[np.uint8]":
        import numpy as np  # not for `is_gguf`, which every start asks first

        return np.frombuffer(self._map, np.uint8)

    def packed_rows(
        self, tensor: GgufTensor, block_values: int, block_bytes: int
    ) -> "NDArray[np.uint8]":
        """The tensor's bytes, one line per row, mapped from the file."""
        if tensor.shape[-1] % block_values:
            raise ConfigError(f"tensor '{tensor.name}' has rows of {tensor.shape[-1]} values")
        row_bytes = tensor.shape[-1] // block_values * block_bytes
        num_rows = math.prod(tensor.shape[:-1])
        end = tensor.offset + num_rows * row_bytes
        if end > len(self._bytes):
            raise ConfigError(f"'{self.path}' ends inside tensor '{tensor.name}'; fetch it again")
        return self._bytes[tensor.offset : end].reshape(num_rows, row_bytes)


class _Reader:
    """A cursor over the head; little-endian."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.at = 0

    def take(self, num_bytes: int) -> bytes:
        if num_bytes < 0 or self.at + num_bytes > len(self._data):
            raise ValueError("the file ends inside its head")
        self.at += num_bytes
        return self._data[self.at - num_bytes : self.at]

    def number(self, letter: str) -> Any:
        return struct.unpack("<" + letter, self.take(struct.calcsize(letter)))[0]

    def count(self) -> int:
        count = int(self.number("Q"))
        if count > _MAX_COUNT:
            raise ValueError(f"{count} entries in its head")
        return count

    def text(self) -> str:
        return self.take(self.number("Q")).decode()

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            item, count = self.number("I"), self.number("Q")
            if depth == _MAX_DEPTH:
                raise ValueError(f"arrays in arrays, more than {_MAX_DEPTH} deep")
            if count > min(_MAX_ITEMS, len(self._data)):
                raise ValueError(f"an array of {count} entries")
            if item in _SCALARS:
                size = struct.calcsize(_SCALARS[item])
                return list(struct.unpack(f"<{count}{_SCALARS[item]}", self.take(count * size)))
            return [self.value(item, depth + 1) for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError(f"a field of unknown type {kind}")
        return self.number(_SCALARS[kind])
