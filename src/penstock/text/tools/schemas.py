"""What the tools of a request are called, and the JSON types that their parameters take.

For formats that write values without quotation marks: `as_json` turns such a value into JSON.
Types steer the reading, they are not checked: a value that fits none of them is a string.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_JSON_TYPES: dict[type, str] = {
    **{str: "string", bool: "boolean", int: "integer", float: "number"},
    **{type(None): "null", dict: "object", list: "array"},
}
_MAX_NESTED_SCHEMAS = 8
_NOTES = {"title", "description", "default", "examples"}


class ToolSchemas:
    """`tools` as in a request; what is not shaped like one has no parameters."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        functions = [tool.get("function") for tool in tools]
        self._tools = {str(one.get("name")): one for one in functions if isinstance(one, Mapping)}
        self.names = self._tools.keys()

    def types(self, name: str, key: str) -> frozenset[str] | None:
        """Of a parameter; None: nobody said."""
        parameters = self._tools.get(name, {}).get("parameters")
        if not isinstance(parameters, Mapping):
            return None
        properties = resolved(parameters, parameters).get("properties")
        return (
            types_of(properties.get(key), parameters) if isinstance(properties, Mapping) else None
        )


def resolved(schema: Mapping[str, Any], root: Mapping[str, Any]) -> dict[str, Any]:
    """With what it only refers to, within the same document: `$ref`, or an `allOf` of one."""
    found = dict(schema)
    for _ in range(_MAX_NESTED_SCHEMAS):
        all_of = found.get("allOf")
        if isinstance(reference := found.get("$ref"), str) and reference.startswith("#/"):
            target: Any = root
            for step in reference[2:].split("/"):
                step = step.replace("~1", "/").replace("~0", "~")
                target = target.get(step) if isinstance(target, Mapping) else None
            name = "$ref"
        elif isinstance(all_of, list) and len(all_of) == 1:
            target, name = all_of[0], "allOf"
        else:
            break
        if not isinstance(target, Mapping):
            break
        rest = {key: value for key, value in found.items() if key != name}
        if any(target[key] != rest[key] for key in target.keys() & rest.keys() - _NOTES):
            break  # both of them count
        found = {**target, **rest}
    return found


def types_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str] | None:
    """The JSON types that a schema takes; None: it does not say."""
    if not isinstance(schema, Mapping) or depth > _MAX_NESTED_SCHEMAS:
        return None
    schema = resolved(schema, root)
    match schema.get("type"):
        case str(one):
            return frozenset([one])
        case list(several):
            return frozenset(one for one in several if isinstance(one, str))
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return frozenset(_JSON_TYPES.get(type(one), "string") for one in values)
    for choice in ("anyOf", "oneOf"):
        if isinstance(branches := schema.get(choice), list):
            found = [types_of(branch, root, depth + 1) for branch in branches]
            known = [one for one in found if one is not None]
            return frozenset().union(*known) if len(known) == len(found) else None
    return None


def as_json(value: str, types: frozenset[str] | None) -> str:
    """The value as JSON: as its types say, else as what it looks like."""
    plain = value.strip()
    has = (lambda *_: True) if types is None else (lambda *some: not types.isdisjoint(some))
    if has("null") and plain in ("null", "None"):
        return "null"
    if plain[:1] in ("{", "[") and has("object", "array") and is_json(plain):
        return plain
    if types is not None and "string" in types:
        return quoted(value)
    if has("boolean") and plain in ("true", "false", "True", "False"):
        return plain.lower()
    if has("integer", "number") and _NUMBER.fullmatch(plain):
        return plain
    return quoted(value)


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_refuse, parse_int=str, parse_float=str)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(constant: str) -> None:
    raise ValueError(constant)  # NaN and the infinities are not JSON
