"""Settings put together: flags, then the YAML file over them, then `--set` over both.

Sections are merged name by name, so a file that sets one field of a section keeps the others.
What a name or a value means is the schema's business.
"""

from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from penstock.config.schema import EngineConfig
from penstock.config.trtllm_fields import canonical, put
from penstock.errors import ConfigError


def load_config(
    flags: Mapping[str, Any] | None = None,
    path: str | Path | None = None,
    sets: Sequence[str] = (),
) -> EngineConfig:
    """`flags` has the shape of the YAML file; `sets` are "a.b=value" with a YAML value."""
    values = canonical(flags or {})
    if path is not None:
        values = merge(values, canonical(read_yaml(Path(path))))
    for text in sets:
        values = merge(values, parse_set(text))
    return EngineConfig.model_validate(values)


def merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` wins; where both have a mapping, field by field."""
    result = dict(under)
    for name, value in over.items():
        below = result.get(name)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            value = merge(below, value)
        result[name] = value
    return result


def read_yaml(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error}") from None
    values = _parse(text, str(path))
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"{path} holds a {type(values).__name__}, it must be a mapping such as "
            "'max_batch_size: 64'"
        )
    return values


def parse_set(text: str) -> dict[str, Any]:
    """`a.b=value` -> {"a": {"b": value}}, aliases replaced."""
    path, equals, value = text.partition("=")
    path = path.strip()
    if not equals or not all(path.split(".")):
        raise ConfigError(
            f"--set {text}: expected NAME=VALUE, such as kv_cache_config.max_tokens=4096"
        )
    values: dict[str, Any] = {}
    put(values, path, _parse(value, f"--set {path}"))
    return canonical(values)


class _Loader(yaml.SafeLoader):
    """Plain data only, and a name given twice is an error instead of a silent loss."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"'{key.value}' is given twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _parse(text: str, source: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError(f"{source}{line}: not valid YAML: {problem}") from None
