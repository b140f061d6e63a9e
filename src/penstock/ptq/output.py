"""The new folder: a file of tensors per block, and what else a checkpoint in HF layout has.

Every file is written whole or not at all. What lies beside the tensors is copied from the folder of
the plain checkpoint, or made of what a GGUF file says.
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from penstock.hub.gguf_file import GgufFile, is_gguf
from penstock.models.gguf_config import whole_config
from penstock.text.gguf_tokenizer import save_gguf_tokenizer

_NOT_COPIED = (".safetensors", ".safetensors.index.json", ".bin", ".gguf", ".pth")


@dataclass(frozen=True, slots=True)
class Output:
    folder: Path
    num_blocks: int

    def block(self, number: int) -> Path:
        """The tensors of one block; those of none come after the last."""
        return self.folder / f"model-{number + 1:05d}-of-{self.num_blocks + 1:05d}.safetensors"

    def in_blocks(self) -> dict[str, str]:
        """The file of each tensor that was written."""
        found: dict[str, str] = {}
        for path in map(self.block, range(self.num_blocks)):
            with safe_open(path, framework="pt") as opened:
                found |= dict.fromkeys(opened.keys(), path.name)
        return found

    def finish(
        self, rest: dict[str, Tensor], source: Path, architecture: str, settings: dict[str, Any]
    ) -> None:
        """`rest` are the tensors outside of blocks, `source` is the plain checkpoint, `settings`
        its quantization_config from now on."""
        last = self.block(self.num_blocks)
        save(rest, last)
        files = self.in_blocks() | dict.fromkeys(rest, last.name)
        total = sum((self.folder / name).stat().st_size for name in set(files.values()))
        index = {"metadata": {"total_size": total}, "weight_map": files}
        write(self.folder / "model.safetensors.index.json", index)
        if is_gguf(source):
            save_gguf_tokenizer(source, self.folder)
            config = whole_config(GgufFile(source), architecture)
        else:
            for path in _small_files(source):
                shutil.copy(path, self.folder / path.name)
            config = json.loads((source / "config.json").read_text(encoding="utf-8"))
        write(self.folder / "config.json", config | {"quantization_config": settings})


def _small_files(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.is_file() and not path.name.endswith(_NOT_COPIED):
            yield path


def save(tensors: dict[str, Tensor], path: Path) -> None:
    partial = path.with_suffix(".partial")
    contiguous = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
    save_file(contiguous, partial, metadata={"format": "pt"})
    partial.rename(path)


def write(path: Path, record: dict[str, Any]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(record, indent=1), encoding="utf-8")
    partial.rename(path)
