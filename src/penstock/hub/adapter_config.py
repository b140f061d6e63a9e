"""`adapter_config.json` of a folder in PEFT's layout: what is read of it, and what is refused by
name. Needs no torch."""

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from penstock.errors import ConfigError
from penstock.hub.files import has_file, read_json

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"

# Field -> (values that ask for nothing, why any other is refused).
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "bias": (("none",), "biases of adapters are not added"),
    "use_dora": ((False,), "DoRA is not supported"),
    "modules_to_save": (((), []), "only low-rank changes are loaded, no whole modules"),
    "lora_bias": ((False,), "biases of adapters are not added"),
    "fan_in_fan_out": ((False,), "matrices must be [outputs, inputs]"),
    "layer_replication": (((), []), "layers are not repeated"),
    "target_parameters": (((), []), "experts and other plain parameters take no adapters"),
    "trainable_token_indices": (((), [], {}), "embeddings take no adapters"),
    "alora_invocation_tokens": (((), []), "activated adapters are not supported"),
    "use_qalora": ((False,), "QALoRA is not supported"),
    "use_bdlora": ((False,), "block-diagonal adapters are not supported"),
    "arrow_config": ((), "routing between adapters is not supported"),
    "megatron_config": ((), "Megatron's layers are not read"),
}
_PLAIN_KEY = re.compile(r"\^?[\w.]+")
_MAX_RANK = 4096
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    rank: int
    alpha: float
    use_rslora: bool = False
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    target_modules: tuple[str, ...] = ()  # as far as the file names them one by one

    @property
    def max_rank(self) -> int:
        return max([self.rank, *self.rank_pattern.values()])

    def rank_of(self, module: str) -> int:
        return _by_module(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        """What the product of the two matrices is multiplied by."""
        rank, alpha = self.rank_of(module), _by_module(self.alpha_pattern, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def _by_module(pattern: dict[str, _T], module: str, default: _T) -> _T:
    for key, value in pattern.items():
        if module == key.removeprefix("^") or (
            not key.startswith("^") and module.endswith(f".{key}")
        ):
            return value
    return default


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Refuses what this project does not do with adapters, by its name."""
    path = folder / CONFIG
    for needed in (path, folder / WEIGHTS):
        if not has_file(needed):
            other = needed.with_name("adapter_model.bin")
            hint = " (adapter_model.bin is not read: save it as safetensors)"
            raise ConfigError(
                f"'{folder}' has no {needed.name}; an adapter is a folder in PEFT's layout"
                f"{hint if needed.name == WEIGHTS and other.exists() else ''}"
            )
    fields = read_json(path)
    kind = fields.get("peft_type", "LORA")
    if kind != "LORA":
        raise ConfigError(f"'{path}': peft_type is {kind!r}, only LORA is supported")
    for name, (allowed, why) in _REFUSED.items():
        value = fields.get(name)
        if value is not None and value not in allowed:
            raise ConfigError(f"'{path}': {name} is {str(value)[:80]}: {why}")
    return AdapterConfig(
        rank=_rank(path, "r", fields.get("r", 8)),
        alpha=_number(path, "lora_alpha", fields.get("lora_alpha", 8)),
        use_rslora=bool(fields.get("use_rslora")),
        rank_pattern=_pattern(path, "rank_pattern", fields, _rank),
        alpha_pattern=_pattern(path, "alpha_pattern", fields, _number),
        target_modules=_names(fields.get("target_modules")),
    )


def _rank(path: Path, name: str, value: Any) -> int:
    if type(value) is not int or not 1 <= value <= _MAX_RANK:
        raise ConfigError(f"'{path}': {name} is {value!r}, it must be 1 to {_MAX_RANK}")
    return value


def _number(path: Path, name: str, value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ConfigError(f"'{path}': {name} is {value!r}, it must be a number")
    return float(value)


def _pattern(path: Path, name: str, fields: dict[str, Any], check: Any) -> dict[str, Any]:
    found = fields.get(name) or {}
    if not isinstance(found, dict):
        raise ConfigError(f"'{path}': {name} must be an object")
    for key in found:
        if not _PLAIN_KEY.fullmatch(key):
            raise ConfigError(
                f"'{path}': {name} has the key {key[:80]!r}: only names of modules are read, no "
                "regular expressions"
            )
    return {key: check(path, f"{name}.{key}", value) for key, value in found.items()}


def _names(value: Any) -> tuple[str, ...]:
    """One text is a regular expression, or "all-linear": the tensors will tell."""
    if not isinstance(value, list):
        return ()
    return tuple(name for name in value if isinstance(name, str))
