"""Tensors of a GGUF file under the names of HF checkpoints, read quantized or dequantized."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.errors import ConfigError
from penstock.hub.gguf_file import GgufFile, GgufTensor
from penstock.kernels.quantized_weight import QuantizedWeight
from penstock.weights.gguf_quants import quantized_rows
from penstock.weights.stored import StoredTensor

_WHOLE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_STACKED = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)_exps\.(weight|bias)")
_IGNORED = ("rope_freqs.weight",)  # read with the configuration


def stream_gguf(path: Path) -> Iterator[StoredTensor]:
    """Every tensor of the file, in the order of the bytes on disk."""
    file = GgufFile(path)
    for tensor in sorted(file.tensors.values(), key=lambda tensor: tensor.offset):
        if tensor.name in _IGNORED:
            continue
        try:
            kind = gguf.GGMLQuantizationType(tensor.type)
            block_values, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            raise ConfigError(
                f"'{path}': tensor '{tensor.name}' is packed as type {tensor.type}, "
                "which is not known; convert the file with a newer program"
            ) from None
        packed = file.packed_rows(tensor, block_values, block_bytes)
        if _STACKED.fullmatch(tensor.name):
            yield from _experts(tensor, packed, kind)
            continue
        rows = _Rows(packed, kind, tensor.shape, _row_order(file, tensor))
        yield StoredTensor(hf_name(tensor.name), tensor.shape, "F32", packed.nbytes, rows)


def _experts(
    tensor: GgufTensor, packed: NDArray[np.uint8], kind: gguf.GGMLQuantizationType
) -> Iterator[StoredTensor]:
    """The matrices, or the biases, of all experts lie behind each other; one tensor for each."""
    found = _STACKED.fullmatch(tensor.name)
    assert found is not None
    layer, part, suffix = found.groups()
    num_experts, *rest = tensor.shape
    if not rest or not num_experts or len(packed) % num_experts:
        raise ConfigError(
            f"tensor '{tensor.name}' has shape {tensor.shape}, no matrix for each expert"
        )
    for number, lines in enumerate(np.split(packed, num_experts)):
        name = f"model.layers.{layer}.mlp.experts.{number}.{part}_proj.{suffix}"
        rows = _Rows(lines, kind, tuple(rest), None)
        yield StoredTensor(name, tuple(rest), "F32", lines.nbytes, rows)


def hf_name(name: str) -> str:
    """An unknown name stays as it is: loading reports it as unexpected."""
    if found := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name):
        layer, part, kind = found.groups()
        return f"model.layers.{layer}.{_IN_LAYER.get(part, part)}.{kind}"
    part, _, kind = name.rpartition(".")
    return f"{_WHOLE.get(part, part)}.{kind}"


def _row_order(file: GgufFile, tensor: GgufTensor) -> NDArray[np.int64] | None:
    """Llama's queries and keys are stored for rotating neighbors; HF rotates halves."""
    metadata = file.metadata
    found = re.fullmatch(r"blk\.\d+\.attn_([qk])\.(weight|bias)", tensor.name)
    if metadata["general.architecture"] != "llama" or found is None:
        return None
    name = "head_count" if found[1] == "q" else "head_count_kv"
    num_heads = metadata.get(f"llama.attention.{name}", metadata["llama.attention.head_count"])
    num_rows = tensor.shape[0]
    if not isinstance(num_heads, int) or num_heads < 1 or num_rows % (2 * num_heads):
        raise ConfigError(
            f"'{file.path}': tensor '{tensor.name}' has {num_rows} rows for {num_heads!s:.40} heads"
        )
    pairs = np.arange(num_rows).reshape(num_heads, num_rows // num_heads // 2, 2)
    return pairs.swapaxes(1, 2).reshape(-1)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Indexed like a tensor; only the rows asked for are unpacked."""

    packed: NDArray[np.uint8]  # one line per row
    kind: gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    order: NDArray[np.int64] | None

    def __getitem__(self, part: tuple[slice, ...]) -> Tensor:
        if len(self.shape) == 1:  # its values are one line
            values = self._unpack(self.packed)[0]
            values = values if self.order is None else values[self.order]
            return torch.from_numpy(values[part[0]])
        return torch.from_numpy(
            np.ascontiguousarray(self._unpack(self._lines(part[0]))[:, part[1]])
        )

    def quantized(self, part: tuple[slice, ...], device: torch.device) -> QuantizedWeight | None:
        """A part that begins or ends inside a block has none of its own."""
        values, size = gguf.GGML_QUANT_SIZES[self.kind]
        columns = range(*part[-1].indices(self.shape[-1]))
        if len(self.shape) != 2 or columns.start % values or columns.stop % values:
            return None
        if device.type != "cpu":  # no GPU kernel reads these blocks: they are dequantized
            return None
        blocks = slice(columns.start // values * size, columns.stop // values * size)
        return quantized_rows(self._lines(part[0])[:, blocks], self.kind)

    def _lines(self, rows: slice) -> NDArray[np.uint8]:
        return self.packed[rows] if self.order is None else self.packed[self.order[rows]]

    def _unpack(self, lines: NDArray[np.uint8]) -> NDArray[np.float32]:
        if self.kind == gguf.GGMLQuantizationType.F32:
            return lines.view(np.float32).copy()
        if self.kind == gguf.GGMLQuantizationType.F16:
            return lines.view(np.float16).astype(np.float32)
        return gguf.dequantize(lines, self.kind)
