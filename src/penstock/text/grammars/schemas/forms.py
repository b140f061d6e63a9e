"""Schemas put together, and what a refusal of one says."""

import json
from typing import Any

Schema = dict[str, Any] | bool

TYPES = ("null", "boolean", "number", "string", "array", "object")


class UnsupportedSchema(Exception):
    """`path`: a JSON pointer to the schema that holds the keyword."""

    def __init__(self, keyword: str, path: str, why: str) -> None:
        super().__init__(f'"{keyword}" {why}')
        self.keyword, self.path = keyword, path


def all_of(*parts: Schema) -> Schema:
    kept = [part for part in parts if part is not True and part != {}]
    if False in kept:
        return False
    return True if not kept else kept[0] if len(kept) == 1 else {"allOf": kept}


def any_of(*parts: Schema) -> Schema:
    kept: list[Schema] = []
    for part in parts:
        if part is True or part == {}:
            return True
        if part is not False and part not in kept:
            kept.append(part)
    return False if not kept else kept[0] if len(kept) == 1 else {"anyOf": kept}


def of_other_types(*types: str) -> Schema:
    others = [one for one in TYPES if one not in types]
    return {"type": others} if others else False


def type_of(value: Any) -> str:
    if value is None:
        return "null"
    kinds = {bool: "boolean", int: "number", float: "number", str: "string", list: "array"}
    return kinds.get(type(value), "object")


def canonical(value: Any) -> str:
    """The same text for values that JSON Schema takes as equal: 1 and 1.0, never 1 and true."""
    return json.dumps(_with_integers(value), sort_keys=True)


def _with_integers(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_with_integers(one) for one in value]
    if isinstance(value, dict):
        return {name: _with_integers(one) for name, one in value.items()}
    return value


def absent(name: str) -> dict[str, Any]:
    return {"properties": {name: False}}


def parts_of(schema: dict[str, Any], keyword: str, path: str) -> list[tuple[Schema, str]]:
    """Each with its path."""
    return [(one, f"{path}/{keyword}/{i}") for i, one in enumerate(schema.get(keyword, ()))]
