"""The checkpoint to quantize: its tensors by the names that HF checkpoints give them."""

from pathlib import Path

from torch import Tensor

from penstock.errors import ConfigError
from penstock.hub.gguf_file import is_gguf
from penstock.weights.mapping import Rules
from penstock.weights.stored import StoredTensor
from penstock.weights.stream import stream, weight_files


class Source:
    """`rules` are those of its model. GGUF tensors are dequantized when read."""

    def __init__(self, folder: Path, rules: Rules) -> None:
        self._is_gguf = is_gguf(folder)
        tensors = stream(weight_files(folder))
        self._tensors = {self._name(tensor, rules): tensor for tensor in tensors}

    def names(self, prefix: str = "") -> list[str]:
        return [name for name in self._tensors if name.startswith(prefix)]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def matrix(self, name: str) -> Tensor:
        """One to be quantized."""
        if name not in self._tensors or len(self.shape(name)) > 2:
            raise ConfigError(
                f"the checkpoint keeps several matrices in '{name}'; such experts cannot be "
                "quantized"
            )
        return self._whole(name)

    def kept(self, name: str) -> Tensor:
        """One that stays as it is; of a GGUF file, in the 16 bits that it was made of."""
        return self._whole(name).bfloat16() if self._is_gguf else self._whole(name)

    def _whole(self, name: str) -> Tensor:
        return self._tensors[name].read(tuple(slice(None) for _ in self.shape(name)))

    def _name(self, tensor: StoredTensor, rules: Rules) -> str:
        """A GGUF file calls experts alike whatever the model is, HF checkpoints do not."""
        target = rules.target(tensor.name) if self._is_gguf else None
        return tensor.name if target is None else rules.source(target)
