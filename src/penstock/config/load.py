"""Settings put together: flags, then the YAML file over them, then `--set` over both.

Sections are merged name by name, so a file that sets one field of a section keeps the others.
What a name or a value means is the schema's business.

A file is read as data from anywhere: aliases that contain themselves or multiply, deep nesting and
endless files are refused in words.
"""

import stat
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from penstock import log
from penstock.config.messages import SECRET, shown
from penstock.config.schema import EngineConfig
from penstock.config.trtllm_fields import canonical, put
from penstock.errors import ConfigError

_MAX_BYTES = 1 << 20
_MAX_VALUES = 100_000  # with every alias written out
_MAX_DEPTH = 50
_NAMED_BY_SHELL = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")  # pipes that somebody writes to
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


def read_yaml(path: Path) -> Mapping[str, Any]:
    values = _parse(_read(path), str(path))
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"{path} holds a {type(values).__name__}, it must be a mapping such as "
            "'max_batch_size: 64'"
        )
    return values


def _read(path: Path) -> str:
    try:
        is_pipe = stat.S_ISFIFO(path.stat().st_mode)
        if is_pipe and not str(path).startswith(_NAMED_BY_SHELL):
            raise OSError("it is a pipe, and nobody may be writing to it")
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise OSError(f"it is larger than {_MAX_BYTES >> 20} MiB")
        return content.decode()
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error}") from None


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
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _num_values(node, source, {}, ())
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError(f"{source}{line}: not valid YAML: {problem}") from None
    except RecursionError:
        raise ConfigError(f"{source}: not valid YAML: nested too deeply") from None
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        # Such as a date in the 13th month; the library lets through what Python says of it.
        raise ConfigError(f"{source}: not valid YAML: a value cannot be read: {error}") from None


def _num_values(
    node: yaml.Node, source: str, known: dict[int, int], around: tuple[int, ...]
) -> int:
    """How many values the node stands for once its aliases are written out; too many are refused.

    `known` has the nodes counted so far, `around` those that this one lies in.
    """
    where = f"{source}, line {node.start_mark.line + 1}"
    if id(node) in around:
        raise ConfigError(f"{where}: an alias (*name) stands inside what it is an alias of")
    if len(around) > _MAX_DEPTH:
        raise ConfigError(f"{where}: nested more than {_MAX_DEPTH} deep")
    if id(node) in known:
        return known[id(node)]
    parts: list[yaml.Node] = []
    if isinstance(node, yaml.SequenceNode):
        parts = node.value
    elif isinstance(node, yaml.MappingNode):
        parts = [part for pair in node.value for part in pair]
    elif any(0xD800 <= ord(char) < 0xE000 for char in node.value):
        raise ConfigError(f"{where}: a text has half of a surrogate pair, which is no character")
    total = 1
    for part in parts:
        total += _num_values(part, source, known, (*around, id(node)))
        if total > _MAX_VALUES:
            raise ConfigError(f"{where}: more than {_MAX_VALUES} values, aliases written out")
    known[id(node)] = total
    return total
