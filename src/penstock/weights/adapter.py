"""Reads an adapter in PEFT's layout: the pairs of matrices of this rank, by layer of the model.

The names of its tensors find their layers by the rules that the checkpoint's do, so fused layers
get their parts and rows of queries and keys their order.
"""

# R rank, I inputs, O outputs

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock.hub.adapter_config import WEIGHTS, AdapterConfig, read_adapter_config
from penstock.layers.linear import Linear
from penstock.layers.lora import LoraPair
from penstock.weights.load import named_parts
from penstock.weights.mapping import Rules, Target
from penstock.weights.stored import StoredTensor
from penstock.weights.stream import stream

_TENSOR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")
_FLOATS = ("F64", "F32", "F16", "BF16")
_OUTSIDE = ("embed.", "head.")
Parts = tuple[LoraPair | None, ...]


@dataclass(frozen=True, slots=True)
class HostAdapter:
    """In host memory; pinned where the device is another."""

    layers: dict[str, Parts]  # by name of the layer, one for each of its parts

    @property
    def num_bytes(self) -> int:
        pairs = (pair for parts in self.layers.values() for pair in parts if pair is not None)
        return sum(pair.num_bytes for pair in pairs)


@dataclass(frozen=True, slots=True)
class WholeSizes:
    """Of a layer on all ranks together."""

    outputs: tuple[int, ...]  # of each part
    inputs: int


def whole_sizes(layer: Linear) -> WholeSizes:
    outputs = tuple(shard.full_size for shard in layer.shape.outputs)
    return WholeSizes(outputs, layer.shape.inputs.full_size)


@dataclass(frozen=True, slots=True)
class AdapterReader:
    """`layers`: those of this stage that take adapters, by name. `sizes`: of those of all stages,
    so that each of them refuses what does not fit one."""

    rules: Rules
    layers: Mapping[str, Linear]
    sizes: Mapping[str, WholeSizes]
    max_rank: int
    dtype: torch.dtype
    is_pinned: bool

    @torch.inference_mode()
    def read(self, folder: Path) -> HostAdapter:
        """What cannot be used is a `ConfigError` that names it."""
        config = read_adapter_config(folder)
        if config.max_rank > self.max_rank:
            raise ConfigError(
                f"the adapter in '{folder}' has rank {config.max_rank}, at most "
                f"{self.max_rank} are taken; raise lora_config.max_lora_rank"
            )
        found: dict[str, list[LoraPair | None]] = {}
        modules = _modules(folder)
        if not modules:
            raise ConfigError(f"the adapter in '{folder}' has no tensors")
        for module, (a_RI, b_OR) in modules.items():
            self._check(folder, module, config, a_RI, b_OR)
            scaled_OR = b_OR.float() * config.scale_of(module)
            for name, rows_OR in self._parts(module, scaled_OR):
                self._add(found, folder, module, name, a_RI, rows_OR)
        return HostAdapter({name: tuple(parts) for name, parts in found.items()})

    def _parts(self, module: str, b_OR: Tensor) -> Iterable[tuple[str, StoredTensor]]:
        name = f"{module}.weight"
        stored = StoredTensor(name, tuple(b_OR.shape), "F32", b_OR.nbytes, b_OR)
        return named_parts([stored], self.rules)

    def _check(
        self, folder: Path, module: str, config: AdapterConfig, a_RI: Tensor, b_OR: Tensor
    ) -> None:
        rank = config.rank_of(module)
        if a_RI.ndim != 2 or b_OR.ndim != 2 or not a_RI.shape[0] == b_OR.shape[1] == rank:
            raise ConfigError(
                f"the adapter in '{folder}': '{module}' has matrices of {list(a_RI.shape)} and "
                f"{list(b_OR.shape)}, adapter_config.json says rank {rank}"
            )

    def _add(
        self,
        found: dict[str, list[LoraPair | None]],
        folder: Path,
        module: str,
        name: str,
        a_RI: Tensor,
        b_OR: StoredTensor,
    ) -> None:
        target = self.rules.target(name)
        layer_name = "" if target is None else target.parameter.removesuffix(".weight")
        whole = self.sizes.get(layer_name)
        if target is None or whole is None:
            raise ConfigError(f"the adapter in '{folder}' changes '{module}': {self._why(name)}")
        size = whole.outputs[target.part], whole.inputs
        if (b_OR.shape[0], a_RI.shape[1]) != size:
            raise ConfigError(
                f"the adapter in '{folder}': '{module}' changes a matrix of "
                f"[{b_OR.shape[0]}, {a_RI.shape[1]}], the model's is {[*size]}: it is made for "
                "another model"
            )
        if (layer := self.layers.get(layer_name)) is None:
            return  # another stage's
        outputs, inputs = layer.shape.outputs[target.part], layer.shape.inputs
        parts = found.setdefault(layer_name, [None] * len(layer.shape.outputs))
        rows_OR = b_OR.read((outputs.source.slice, slice(None)))
        parts[target.part] = LoraPair(
            self._kept(a_RI[:, inputs.source.slice]), self._kept(rows_OR.T)
        )

    def _kept(self, x: Tensor) -> Tensor:
        """A copy of its own, not a view of the file."""
        kept = torch.empty(x.shape, dtype=self.dtype, pin_memory=self.is_pinned)
        return kept.copy_(x)

    def _why(self, name: str) -> str:
        target = self.rules.target(name)
        inside = "" if target is None else target.parameter
        if _is_of_experts(inside):
            return "experts take no adapters"
        if inside.startswith(_OUTSIDE):
            return "embeddings and the head take no adapters"
        known = sorted(
            {name for layer in self.sizes for name in module_names(self.rules, layer, self.sizes)}
        )
        return (
            f"no layer of this run takes it; those that do are {', '.join(known)} (see "
            "lora_config.lora_target_modules)"
        )


def _is_of_experts(name: str) -> bool:
    return ".experts." in f".{name}"


def module_names(rules: Rules, name: str, sizes: Mapping[str, WholeSizes]) -> list[str]:
    """What checkpoints call the parts of a layer: "q_proj", "k_proj", "v_proj"."""
    parts = range(len(sizes[name].outputs))
    return [rules.source(Target(name, part)).rpartition(".")[2] for part in parts]


def _modules(folder: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Module -> its two matrices, which are views of the file."""
    found: dict[str, dict[str, Tensor]] = {}
    for tensor in stream((folder / WEIGHTS,)):
        match = _TENSOR.fullmatch(tensor.name)
        if match is None or tensor.dtype not in _FLOATS:
            what = "embeddings take no adapters" if "embedding" in tensor.name else "not known"
            raise ConfigError(
                f"the adapter in '{folder}' has the tensor '{tensor.name}' ({tensor.dtype}): {what}"
            )
        whole = tensor.read(tuple(slice(None) for _ in tensor.shape))
        found.setdefault(match[1], {})[match[2]] = whole
    for module, both in found.items():
        if len(both) < 2:
            raise ConfigError(f"the adapter in '{folder}' has one matrix of '{module}', not two")
    return {module: (both["A"], both["B"]) for module, both in found.items()}
