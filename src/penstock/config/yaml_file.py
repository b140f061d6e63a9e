"""A YAML file read as data from anywhere: aliases that contain themselves or multiply, deep nesting
and endless files are refused in words.
"""

import stat
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import yaml

from penstock.errors import ConfigError

_MAX_BYTES = 1 << 20
_MAX_VALUES = 100_000  # with every alias written out
_MAX_DEPTH = 50
_NAMED_BY_SHELL = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")  # pipes that somebody writes to


def read_yaml(path: Path) -> Mapping[str, Any]:
    values = parse_yaml(_read(path), str(path))
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


def parse_yaml(text: str, source: str) -> Any:
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
