"""What a schema does not allow, keyword by keyword: one of these ways, or less."""

from collections.abc import Callable, Iterator
from itertools import combinations, pairwise
from typing import TYPE_CHECKING, Any

from penstock.text.grammars.schemas.branches import kinds_of, names_of
from penstock.text.grammars.schemas.forms import (
    Schema,
    UnsupportedSchema,
    absent,
    all_of,
    of_other_types,
    parts_of,
    type_of,
)
from penstock.text.grammars.schemas.patterns import other_texts
from penstock.text.grammars.schemas.plain import escaped

if TYPE_CHECKING:
    from penstock.text.grammars.schemas.rewriting import Rewriting

_MAX_TEXT, _MAX_TEXTS = 256, 20_000  # characters of a text that is forbidden, and of all of them
_MAX_FIRST = 4  # items of which one may be another
_LIMITS = (
    ("minimum", "exclusiveMaximum"),
    ("exclusiveMinimum", "maximum"),
    ("maximum", "exclusiveMinimum"),
    ("exclusiveMaximum", "minimum"),
)


def other_values(values: list[Any], path: str) -> Iterator[Schema]:
    """Some of lists and objects, and no number that is not between two of those."""
    kinds = set(map(type_of, values))
    yield of_other_types(*kinds)
    if "boolean" in kinds:
        others = [one for one in (True, False) if not any(one is value for value in values)]
        yield {"enum": others} if others else False
    if texts := [one for one in values if isinstance(one, str)]:
        if max(map(len, texts)) > _MAX_TEXT or sum(map(len, texts)) > _MAX_TEXTS:
            raise UnsupportedSchema("const", path, "is too long to be negated")
        yield {"type": "string", "pattern": other_texts(texts)}
    if numbers := sorted({one for one in values if type_of(one) == "number"}):
        yield {"type": "number", "exclusiveMaximum": numbers[0]}
        yield {"type": "number", "exclusiveMinimum": numbers[-1]}
        for low, high in pairwise(numbers):
            yield {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high}
    if lists := [one for one in values if isinstance(one, list)]:
        yield {"type": "array", "minItems": max(map(len, lists)) + 1}
        if least := min(map(len, lists)):
            yield {"type": "array", "maxItems": least - 1}
    if objects := [one for one in values if isinstance(one, dict)]:
        for name in sorted(set.intersection(*map(set, objects))):
            yield {"type": "object", **absent(name)}


def _deny_type(rewriting: "Rewriting", schema: Any, path: str) -> Iterator[Schema]:
    yield of_other_types(*kinds_of(schema["type"]))


def _deny_const(rewriting: "Rewriting", schema: Any, path: str) -> Iterator[Schema]:
    yield from other_values([schema["const"]], path)


def _deny_enum(rewriting: "Rewriting", schema: Any, path: str) -> Iterator[Schema]:
    yield from other_values(schema["enum"], path)


def _deny_limit(rewriting: "Rewriting", schema: Any, path: str) -> Iterator[Schema]:
    for keyword, opposite in _LIMITS:
        if keyword in schema:
            yield {"type": "number", opposite: schema[keyword]}


def _deny_counts(rewriting: "Rewriting", schema: Any, path: str) -> Iterator[Schema]:
    kinds = (("Length", "string"), ("Items", "array"), ("Properties", "object"))
    for name, kind in kinds:
        if schema.get(f"min{name}", 0) > 0:
            yield {"type": kind, f"max{name}": schema[f"min{name}"] - 1}
        if f"max{name}" in schema:
            yield {"type": kind, f"min{name}": schema[f"max{name}"] + 1}


def _deny_required(rewriting: "Rewriting", schema: Any, path: str) -> Iterator[Schema]:
    for name in names_of(schema["required"]):
        yield {"type": "object", **absent(name)}


def _deny_properties(rewriting: "Rewriting", schema: Any, path: str) -> Iterator[Schema]:
    for name, one in schema["properties"].items():
        other = rewriting.denied(one, f"{path}/properties/{escaped(name)}")
        if other is not False:
            yield {"type": "object", "properties": {name: other}, "required": [name]}


def _deny_items(rewriting: "Rewriting", schema: Any, path: str) -> Iterator[Schema]:
    first = schema.get("prefixItems", [])
    for i, one in enumerate(first):
        other = rewriting.denied(one, f"{path}/prefixItems/{i}")
        if other is not False:
            places = [*[True] * i, other]
            yield {"type": "array", "prefixItems": places, "minItems": len(places)}
    if "items" in schema:
        other = rewriting.shared(rewriting.denied(schema["items"], f"{path}/items"))
        for place in range(len(first), len(first) + _MAX_FIRST) if other is not False else ():
            places = [*[True] * place, other]
            yield {"type": "array", "prefixItems": places, "minItems": len(places)}


def _deny_all(rewriting: "Rewriting", schema: Any, path: str) -> Iterator[Schema]:
    yield from (rewriting.denied(one, where) for one, where in parts_of(schema, "allOf", path))


def _deny_any(rewriting: "Rewriting", schema: Any, path: str) -> Iterator[Schema]:
    yield all_of(*(rewriting.denied(one, where) for one, where in parts_of(schema, "anyOf", path)))


def _deny_one(rewriting: "Rewriting", schema: Any, path: str) -> Iterator[Schema]:
    branches = parts_of(schema, "oneOf", path)
    yield all_of(*(rewriting.denied(one, where) for one, where in branches))
    for pair in combinations(branches, 2):
        yield all_of(*(rewriting.kept(one, where) for one, where in pair))


def _deny_not(rewriting: "Rewriting", schema: Any, path: str) -> Iterator[Schema]:
    yield rewriting.kept(schema["not"], f"{path}/not")


def _deny_if(rewriting: "Rewriting", schema: Any, path: str) -> Iterator[Schema]:
    for keyword, is_kept in (("then", True), ("else", False)):
        if keyword in schema:
            condition = rewriting.case(schema, path, "if", is_kept)
            yield all_of(condition, rewriting.case(schema, path, keyword, False))


def _deny_ref(rewriting: "Rewriting", schema: Any, path: str) -> Iterator[Schema]:
    """At once: what refers to it may do without, if it cannot be said."""
    name = f"{schema['$ref'].removeprefix('#/$defs/')}_not"
    if name not in rewriting.made:
        rewriting.made[name] = False
        target = rewriting.targets[schema["$ref"]]
        try:
            rewriting.made[name] = rewriting.denied(target.schema, target.path)
        except UnsupportedSchema:
            del rewriting.made[name]
            raise
    yield {"$ref": f"#/$defs/{name}"}


def _deny_dependent_required(rewriting: "Rewriting", schema: Any, path: str) -> Iterator[Schema]:
    for name, needed in schema["dependentRequired"].items():
        for one in needed:
            yield {"type": "object", "required": [name], **absent(one)}


def _deny_dependent_schemas(rewriting: "Rewriting", schema: Any, path: str) -> Iterator[Schema]:
    for name, one in schema["dependentSchemas"].items():
        other = rewriting.denied(one, f"{path}/dependentSchemas/{escaped(name)}")
        yield all_of({"type": "object", "required": [name]}, other)


def _deny_contains(rewriting: "Rewriting", schema: Any, path: str) -> Iterator[Schema]:
    if "maxContains" in schema or schema.get("minContains", 1) != 1:
        raise UnsupportedSchema("contains", path, "with counts cannot be negated")
    other = rewriting.denied(schema["contains"], f"{path}/contains")
    yield {"type": "array", "items": other}


def _deny_open(rewriting: "Rewriting", schema: Any, path: str) -> Iterator[Schema]:
    others = [schema.get("additionalProperties", True)]
    if any(one is not True for one in (*others, *schema.get("patternProperties", {}).values())):
        raise UnsupportedSchema("additionalProperties", path, "cannot be negated")
    yield from ()


def _deny_format(rewriting: "Rewriting", schema: Any, path: str) -> Iterator[Schema]:
    raise UnsupportedSchema("format", path, "cannot be negated")


def _deny_pattern(rewriting: "Rewriting", schema: Any, path: str) -> Iterator[Schema]:
    raise UnsupportedSchema("pattern", path, "cannot be negated")


def _deny_multiple(rewriting: "Rewriting", schema: Any, path: str) -> Iterator[Schema]:
    raise UnsupportedSchema("multipleOf", path, "cannot be negated")


def _deny_other(rewriting: "Rewriting", schema: Any, path: str) -> Iterator[Schema]:
    keywords = ("uniqueItems", "propertyNames", "unevaluatedProperties", "unevaluatedItems")
    keyword = next(one for one in keywords if one in schema)
    raise UnsupportedSchema(keyword, path, "cannot be negated")


_Denial = Callable[["Rewriting", Any, str], Iterator[Schema]]
DENIALS: dict[str, _Denial] = {
    "type": _deny_type,
    "const": _deny_const,
    "enum": _deny_enum,
    **dict.fromkeys(("minimum", "maximum"), _deny_limit),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), _deny_limit),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), _deny_counts),
    **dict.fromkeys(("minProperties", "maxProperties"), _deny_counts),
    "required": _deny_required,
    "properties": _deny_properties,
    **dict.fromkeys(("items", "prefixItems"), _deny_items),
    "allOf": _deny_all,
    "anyOf": _deny_any,
    "oneOf": _deny_one,
    "not": _deny_not,
    "if": _deny_if,
    "$ref": _deny_ref,
    "dependentRequired": _deny_dependent_required,
    "dependentSchemas": _deny_dependent_schemas,
    "contains": _deny_contains,
    **dict.fromkeys(("additionalProperties", "patternProperties"), _deny_open),
    "format": _deny_format,
    "pattern": _deny_pattern,
    "multipleOf": _deny_multiple,
    **dict.fromkeys(("uniqueItems", "propertyNames"), _deny_other),
    **dict.fromkeys(("unevaluatedProperties", "unevaluatedItems"), _deny_other),
}
