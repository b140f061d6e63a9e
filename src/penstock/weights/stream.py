"""Reads a checkpoint's tensors one at a time from the mapped files; a part costs only that part."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.errors import ConfigError

_INDEX = "model.safetensors.index.json"
_FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor that still lies in its file."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # as safetensors writes it: "BF16"
    _slice: Any

    @property
    def is_float(self) -> bool:
        return self.dtype in _FLOAT_BYTES

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * _FLOAT_BYTES.get(self.dtype, 1)

    def read(self, part: tuple[slice, ...]) -> Tensor:
        """A view into the mapped file: copy it before the stream moves on."""
        return self._slice[part]


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files that make up the checkpoint: those of its index, or all there are."""
    index = folder / _INDEX
    if index.is_file():
        files = _indexed_files(index)
    else:
        files = tuple(
            path
            for path in sorted(folder.glob("*.safetensors"))
            if not path.name.startswith("consolidated")  # a second copy in another layout
        )
    if not files:
        raise ConfigError(
            f"no *.safetensors in '{folder}'; other weight formats are not read, "
            "convert the checkpoint or use load_format=dummy"
        )
    return files


def stream(files: tuple[Path, ...]) -> Iterator[StoredTensor]:
    """Every tensor of every file, in the order of the bytes on disk."""
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.offset_keys():
                    part = opened.get_slice(name)
                    yield StoredTensor(name, tuple(part.get_shape()), part.get_dtype(), part)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"cannot read '{file}': {error}; download it again") from error


def _indexed_files(index: Path) -> tuple[Path, ...]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(f"'{index}' is not a weight index: {error!r}") from error
    for name in names:
        if Path(name).name != name:
            raise ConfigError(f"'{index}' names '{name}', which is not a file of the same folder")
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise ConfigError(
            f"'{index.parent}' lacks {len(missing)} of {len(names)} weight files: "
            f"{', '.join(missing[:5])}; the download is not complete"
        )
    return tuple(index.parent / name for name in names)
