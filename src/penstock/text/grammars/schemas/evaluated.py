"""`unevaluatedProperties` and `unevaluatedItems`: every way to match a schema, and what it says
then of the properties and items that no keyword of that way has looked at."""

from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

from penstock.text.grammars.schemas.forms import (
    Schema,
    UnsupportedSchema,
    absent,
    all_of,
    any_of,
    parts_of,
)
from penstock.text.grammars.schemas.plain import escaped

if TYPE_CHECKING:
    from penstock.text.grammars.schemas.rewriting import Rewriting

_MAX_WAYS = 64


@dataclass(frozen=True, slots=True)
class _Evaluated:
    """What the keywords of a schema have looked at in one way to match it."""

    names: frozenset[str] = frozenset()
    patterns: frozenset[str] = frozenset()
    all_properties: bool = False
    num_items: int = 0
    all_items: bool = False
    forms: tuple[Any, ...] = ()  # of items that `contains` finds

    def __or__(self, other: "_Evaluated") -> "_Evaluated":
        return _Evaluated(
            self.names | other.names,
            self.patterns | other.patterns,
            self.all_properties or other.all_properties,
            max(self.num_items, other.num_items),
            self.all_items or other.all_items,
            (*self.forms, *other.forms),
        )


Way = tuple[Schema, _Evaluated]


def sealed(rewriting: "Rewriting", schema: Any, path: str, seen: tuple[str, ...]) -> list[Way]:
    """Every way to match it, with what it says of properties and items that no part of that
    way has looked at."""
    found: list[Way] = []
    for way, evaluated in _ways(rewriting, schema, path, seen):
        seal: dict[str, Any] = {}
        if "unevaluatedProperties" in schema:
            if not evaluated.all_properties:
                seal["properties"] = dict.fromkeys(sorted(evaluated.names), True)
                seal["patternProperties"] = dict.fromkeys(sorted(evaluated.patterns), True)
                others = schema["unevaluatedProperties"]
                where = f"{path}/unevaluatedProperties"
                seal["additionalProperties"] = rewriting.kept(others, where)
            evaluated = replace(evaluated, all_properties=True)
        if "unevaluatedItems" in schema:
            if not evaluated.all_items:
                seal["prefixItems"] = [True] * evaluated.num_items
                others = rewriting.kept(schema["unevaluatedItems"], f"{path}/unevaluatedItems")
                seal["items"] = any_of(others, *evaluated.forms)
            evaluated = replace(evaluated, all_items=True)
        found.append((all_of(way, seal), evaluated))
    return found


def _ways(rewriting: "Rewriting", schema: Any, path: str, seen: tuple[str, ...]) -> list[Way]:
    """To match all of it but `unevaluatedProperties` and `unevaluatedItems`."""
    spread = ("allOf", "anyOf", "oneOf", "if", "then", "else", "$ref", "dependentSchemas")
    own = {
        key: value
        for key, value in schema.items()
        if key not in (*spread, "unevaluatedProperties", "unevaluatedItems")
    }
    is_recent = rewriting.source.draft >= 2020
    contained = (schema["contains"],) if is_recent and "contains" in schema else ()
    evaluated = _Evaluated(
        frozenset(schema.get("properties", ())),
        frozenset(schema.get("patternProperties", ())),
        "additionalProperties" in schema,
        len(schema.get("prefixItems", ())),
        "items" in schema,
        tuple(rewriting.shared(rewriting.kept(one, f"{path}/contains")) for one in contained),
    )
    groups: list[list[Way]] = [[(rewriting.kept(own, path), evaluated)]]
    for one, where in parts_of(schema, "allOf", path):
        groups.append(_part(rewriting, one, where, seen))
    if "anyOf" in schema:
        branches = parts_of(schema, "anyOf", path)
        groups.append(
            [way for one, where in branches for way in _part(rewriting, one, where, seen)]
        )
    if "oneOf" in schema:
        branches = parts_of(schema, "oneOf", path)
        conditions = rewriting.conditions([one for one, _ in branches], path)
        if conditions is None:
            raise UnsupportedSchema("oneOf", path, "has branches that may match together")
        groups.append(
            [
                (all_of(way, condition), evaluated)
                for (one, where), condition in zip(branches, conditions, strict=True)
                for way, evaluated in _part(rewriting, one, where, seen)
            ]
        )
    if "if" in schema:
        groups.append(_if_ways(rewriting, schema, path, seen))
    if "$ref" in schema:
        groups.append(_ref_ways(rewriting, schema["$ref"], path, seen))
    for name, one in schema.get("dependentSchemas", {}).items():
        where = f"{path}/dependentSchemas/{escaped(name)}"
        has: list[Way] = [
            (all_of({"type": "object", "required": [name]}, way), evaluated)
            for way, evaluated in _part(rewriting, one, where, seen)
        ]
        groups.append([(absent(name), _Evaluated()), *has])
    return _combined(rewriting, groups, path)


def _combined(rewriting: "Rewriting", groups: list[list[Way]], path: str) -> list[Way]:
    num_ways = 1
    for group in groups:
        num_ways *= len(group)
    if num_ways > _MAX_WAYS:
        raise UnsupportedSchema("anyOf", path, "leaves too many ways beside unevaluated ones")
    if num_ways > 1:
        groups = [[(rewriting.shared(way), one) for way, one in group] for group in groups]
    found = []
    for ways in product(*groups):
        evaluated = _Evaluated()
        for _, one in ways:
            evaluated |= one
        rewriting.count(path)
        found.append((all_of(*(way for way, _ in ways)), evaluated))
    return found


def _if_ways(rewriting: "Rewriting", schema: Any, path: str, seen: tuple[str, ...]) -> list[Way]:
    condition = _part(rewriting, schema["if"], f"{path}/if", seen)
    nothing: list[Way] = [(True, _Evaluated())]
    then = _part(rewriting, schema["then"], f"{path}/then", seen) if "then" in schema else nothing
    other = _part(rewriting, schema["else"], f"{path}/else", seen) if "else" in schema else nothing
    fails: list[Way] = [(rewriting.denied(schema["if"], f"{path}/if"), _Evaluated())]
    return [
        *_combined(rewriting, [condition, then], path),
        *_combined(rewriting, [fails, other], path),
    ]


def _ref_ways(rewriting: "Rewriting", ref: str, path: str, seen: tuple[str, ...]) -> list[Way]:
    if ref in seen:
        raise UnsupportedSchema("$ref", path, "comes back to itself beside unevaluated ones")
    target = rewriting.targets[ref]
    return _part(rewriting, target.schema, target.path, (*seen, ref))


def _part(rewriting: "Rewriting", schema: Schema, path: str, seen: tuple[str, ...]) -> list[Way]:
    if isinstance(schema, bool):
        return [(schema, _Evaluated())]
    if "unevaluatedProperties" in schema or "unevaluatedItems" in schema:
        return sealed(rewriting, schema, path, seen)
    return _ways(rewriting, schema, path, seen)
