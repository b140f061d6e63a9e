"""Reads a checkpoint's tensors one at a time from the mapped files; a part costs only that part."""

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open

from penstock.errors import ConfigError
from penstock.hub.files import has_file, read_json, require_regular
from penstock.hub.gguf_file import is_gguf
from penstock.weights.stored import StoredTensor

_INDEX = "model.safetensors.index.json"
_LFS_POINTER = b"version https://git-lfs"
_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2}


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The GGUF file itself; or the safetensors files of the folder's index, or all there are."""
    if is_gguf(folder):
        return (folder,)
    index = folder / _INDEX
    if has_file(index):
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
    for file in files:
        require_regular(file)
    return files


def stream(files: tuple[Path, ...]) -> Iterator[StoredTensor]:
    """Every tensor of every file, in the order of the bytes on disk."""
    for file in files:
        if is_gguf(file):
            from penstock.weights.gguf_tensors import (
                stream_gguf,  # only now, it loads the gguf package
            )

            yield from stream_gguf(file)
            continue
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.offset_keys():
                    part = opened.get_slice(name)
                    shape, dtype = tuple(part.get_shape()), part.get_dtype()
                    num_bytes = math.prod(shape) * _BYTES.get(dtype, 1)
                    yield StoredTensor(name, shape, dtype, num_bytes, part)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"cannot read '{file}': {_why(file, error)}") from error


def _why(file: Path, error: Exception) -> str:
    with contextlib.suppress(OSError), file.open("rb") as opened:
        if opened.read(len(_LFS_POINTER)) == _LFS_POINTER:
            return "it only points to the weights, in Git LFS; fetch them with 'git lfs pull'"
    return f"{error}; download it again"


def _indexed_files(index: Path) -> tuple[Path, ...]:
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise ConfigError(
            f"'{index}' is not a weight index: weight_map must be an object that names a file for "
            "each tensor; fetch it again, or remove it to read every *.safetensors of the folder"
        )
    names = sorted(set(places.values()))
    for name in names:
        if Path(name).name != name or "\0" in name:
            raise ConfigError(f"'{index}' names '{name}', which is not a file of the same folder")
    missing = [name for name in names if not (index.parent / name).exists()]
    if missing:
        raise ConfigError(
            f"'{index.parent}' lacks {len(missing)} of {len(names)} weight files: "
            f"{', '.join(missing[:5])}; the download is not complete"
        )
    return tuple(index.parent / name for name in names)
