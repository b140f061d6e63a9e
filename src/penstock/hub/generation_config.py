"""Default sampling parameters of a model: its generation_config.json, or the catalog's.

They stand in for what a request leaves out. Stop ids of the same file are the model reader's
business (`models.spec`).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError, RequestError
from penstock.hub.catalog import CATALOG
from penstock.types.sampling import SamplingParams

FILE_NAME = "generation_config.json"
NEUTRAL = ("vllm", "trtllm")  # values of the setting: the engine's own defaults
_FIELDS = {  # name in the file -> name in `SamplingParams`
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
_INTEGERS = ("top_k", "max_new_tokens")


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Fields of `SamplingParams`, and where they come from."""

    values: Mapping[str, float]
    reason: str

    def __str__(self) -> str:
        return ", ".join(f"{name} {value:g}" for name, value in self.values.items()) or "neutral"


def sampling_defaults(
    asked: str, overrides: Mapping[str, Any], model: str, folder: Path
) -> SamplingDefaults:
    """`asked`: the setting `generation_config`. `folder`: the model's, or its GGUF file."""
    raw, source = _found(asked, model, folder)
    given = {name: value for name, value in overrides.items() if value is not None}
    values = _checked(raw, source) | _checked(given, "override_generation_config")
    if given:
        source += ", with override_generation_config"
    return SamplingDefaults(values, source)


def _found(asked: str, model: str, folder: Path) -> tuple[Mapping[str, Any], str]:
    if asked in NEUTRAL:
        return {}, f"generation_config is {asked}"
    if asked != "auto":
        path = Path(asked).expanduser()
        return _read(path if path.is_file() else path / FILE_NAME), f"{FILE_NAME} of '{asked}'"
    if model in CATALOG:
        return CATALOG[model].sampling, "what suits this model"
    file = folder / FILE_NAME
    if file.is_file():
        return _read(file), f"{FILE_NAME} of the model"
    return {}, f"the model has no {FILE_NAME}"


def _read(file: Path) -> Mapping[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot read '{file}': {error}; generation_config is auto, vllm or a folder with a "
            f"{FILE_NAME}"
        ) from None
    if not isinstance(values, dict):
        raise ConfigError(f"'{file}' must hold a JSON object")
    return values


def _checked(raw: Mapping[str, Any], source: str) -> dict[str, float]:
    values: dict[str, float] = {}
    for name, field in _FIELDS.items():
        value = raw.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(
            value, int if name in _INTEGERS else int | float
        ):
            kind = "an integer" if name in _INTEGERS else "a number"
            raise _refused(source, f"{name} is {json.dumps(value)}, it must be {kind}")
        values[field] = value
    try:
        SamplingParams(**values)  # type: ignore[arg-type]
    except RequestError as error:
        raise _refused(source, error.message) from None
    return values


def _refused(source: str, what: str) -> ConfigError:
    return ConfigError(
        f"{source}: {what}; correct it, or set generation_config to vllm to leave it out"
    )
