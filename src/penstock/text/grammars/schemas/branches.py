"""What schemas say plainly: the types, the few values, the tags by which branches differ."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.text.grammars.schemas.forms import (
    TYPES,
    Schema,
    UnsupportedSchema,
    canonical,
    type_of,
)
from penstock.text.grammars.schemas.plain import Target

_MAX_STEPS = 20_000
Tags = dict[str, frozenset[str]]  # by property


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def names_of(required: Any) -> list[str]:
    """Draft 3 has a boolean there."""
    return list(dict.fromkeys(required)) if isinstance(required, list) else []


def kinds_of(named: Any) -> set[str]:
    return {"number" if one == "integer" else one for one in listed(named)}


class Branches:
    """Looks through references, so often and no more."""

    def __init__(self, targets: Mapping[str, Target]) -> None:
        self._targets = targets
        self._num_steps = 0

    def _followed(
        self, schema: dict[str, Any], seen: frozenset[str]
    ) -> Iterator[tuple[Schema, frozenset[str]]]:
        """What its reference names, once."""
        self._num_steps += 1
        if self._num_steps > _MAX_STEPS:
            raise UnsupportedSchema("$ref", "#", "is used too often")
        if (ref := schema.get("$ref")) is not None and ref not in seen:
            yield self._targets[ref].schema, seen | {ref}

    def types(self, schema: Schema, seen: frozenset[str] = frozenset()) -> set[str]:
        """Those that may be allowed."""
        if isinstance(schema, bool):
            return set(TYPES) if schema else set()
        found = set(TYPES)
        if "type" in schema:
            found &= kinds_of(schema["type"])
        if "const" in schema:
            found &= {type_of(schema["const"])}
        if "enum" in schema:
            found &= set(map(type_of, schema["enum"]))
        for one in schema.get("allOf", ()):
            found &= self.types(one, seen)
        for key in ("anyOf", "oneOf"):
            if key in schema:
                found &= set().union(*(self.types(one, seen) for one in schema[key]))
        for one, path in self._followed(schema, seen):
            found &= self.types(one, path)
        return found

    def few_values(
        self, schema: Schema, seen: frozenset[str] = frozenset()
    ) -> dict[str, Any] | None:
        """All that may be allowed, if they are few, by their canonical text. None: they are many,
        or it is not plain which."""
        if not isinstance(schema, dict):
            return {} if schema is False else None
        kinds = self.types(schema)
        if "enum" in schema or "const" in schema:
            values = schema["enum"] if "enum" in schema else [schema["const"]]
            return {canonical(one): one for one in values if type_of(one) in kinds}
        if kinds <= {"boolean", "null"}:
            values = [one for one in (True, False, None) if type_of(one) in kinds]
            return {canonical(one): one for one in values}
        for one, path in self._followed(schema, seen):
            return self.few_values(one, path)
        return None

    def tags(self, schema: Schema, seen: frozenset[str] = frozenset()) -> Tags:
        """Properties of few values, and those."""
        if not isinstance(schema, dict):
            return {}
        found: Tags = {}
        for name, one in schema.get("properties", {}).items():
            if (values := self.few_values(one)) is not None:
                found[name] = frozenset(values)
        parts = [(one, seen) for one in schema.get("allOf", ())]
        for part, path in (*parts, *self._followed(schema, seen)):
            for name, others in self.tags(part, path).items():
                found[name] = found.get(name, others) & others
        return found

    def required(self, schema: Schema, seen: frozenset[str] = frozenset()) -> set[str]:
        """Properties that every object has."""
        if not isinstance(schema, dict):
            return set()
        found = set(names_of(schema.get("required")))
        parts = [(one, seen) for one in schema.get("allOf", ())]
        for part, path in (*parts, *self._followed(schema, seen)):
            found |= self.required(part, path)
        return found


def tag_of_all(tags: Sequence[Tags]) -> str | None:
    """A property whose values differ from branch to branch."""
    for name in tags[0] if tags else ():
        values = [own[name] for own in tags if name in own]
        if len(values) == len(tags) and len(set().union(*values)) == sum(map(len, values)):
            return name
    return None


@dataclass(frozen=True, slots=True)
class Test:
    """An `if` that asks whether a property has one of these values."""

    name: str
    values: dict[str, Any]
    is_required: bool  # or it may be missing
    schema: dict[str, Any]
    path: str = "#"


def test_of(schema: Schema) -> Test | None:
    if not isinstance(schema, dict) or not schema.keys() <= {"if", "then", "else"}:
        return None
    condition = schema.get("if")
    if not isinstance(condition, dict) or not condition.keys() <= {"properties", "required"}:
        return None
    properties, required = condition.get("properties", {}), condition.get("required", [])
    if len(properties) != 1 or not set(required) <= properties.keys():
        return None
    [(name, one)] = properties.items()
    if not isinstance(one, dict) or one.keys() not in ({"const"}, {"enum"}):
        return None
    values = one["enum"] if "enum" in one else [one["const"]]
    return Test(name, {canonical(v): v for v in values}, bool(required), schema) if values else None
