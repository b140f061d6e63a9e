"""Settings put together: flags, then the YAML file over them, then `--set` over both.

Sections are merged name by name, so a file that sets one field of a section keeps the others.
What a name or a value means is the schema's business.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock import log
from penstock.config.messages import SECRET, shown
from penstock.config.schema import EngineConfig
from penstock.config.trtllm_fields import canonical, put
from penstock.config.yaml_file import parse_yaml, read_yaml
from penstock.errors import ConfigError

_logger = log.get(__name__)


def load_config(
    flags: Mapping[str, Any] | None = None,
    path: str | Path | None = None,
    sets: Sequence[str] = (),
) -> EngineConfig:
    """`flags` has the shape of the YAML file; `sets` are "a.b=value" with a YAML value."""
    return EngineConfig.model_validate(given_settings(flags, path, sets))


def given_settings(
    flags: Mapping[str, Any] | None = None,
    path: str | Path | None = None,
    sets: Sequence[str] = (),
) -> dict[str, Any]:
    """What the user gave, put together but not yet checked."""
    values = canonical(flags or {})
    if path is not None:
        of_file = canonical(read_yaml(Path(path)))
        for field, flag, winner in differences(values, of_file):
            both = ("***", "***") if field in SECRET else (shown(winner), shown(flag))
            _logger.warning(
                "%s is %s, from %s; the flag's %s is not used: the file wins over flags, as in "
                "TensorRT-LLM, and --set over both",
                *(field, both[0], path, both[1]),
            )
        values = merge(values, of_file)
    for text in sets:
        values = merge(values, parse_set(text))
    return values


def differences(
    under: Mapping[str, Any], over: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Fields that both have, with different values: (field, value of `under`, value of `over`)."""
    for name, winner in over.items():
        if name not in under:  # NaN differs even from itself
            continue
        below = under[name]
        if isinstance(below, Mapping) and isinstance(winner, Mapping):
            yield from differences(below, winner, f"{prefix}{name}.")
        elif below != winner:
            yield f"{prefix}{name}", below, winner


def merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` wins; where both have a mapping, field by field."""
    result = dict(under)
    for name, value in over.items():
        below = result.get(name)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            value = merge(below, value)
        result[name] = value
    return result


def parse_set(text: str) -> dict[str, Any]:
    """`a.b=value` -> {"a": {"b": value}}, aliases replaced."""
    path, equals, value = text.partition("=")
    path = path.strip()
    if not equals or not all(path.split(".")):
        raise ConfigError(
            f"--set {text}: expected NAME=VALUE, such as kv_cache_config.max_tokens=4096"
        )
    values: dict[str, Any] = {}
    put(values, path, parse_yaml(value, f"--set {path}"))
    return canonical(values)
