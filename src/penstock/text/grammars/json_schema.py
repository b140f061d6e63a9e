"""JSON Schema -> a grammar, or a `RequestError` with the path of the part that cannot be one.

A keyword that the library does not know is refused, never left out: an output must be valid.
"""

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

from penstock.errors import RequestError
from penstock.text.grammars.library import (
    MAX_GRAMMAR_CHARS,
    MAX_PROPERTIES,
    fault_of,
    find_fault,
)
from penstock.text.grammars.schemas.forms import UnsupportedSchema
from penstock.text.grammars.schemas.patterns import bounded, bounded_key, is_short_key
from penstock.text.grammars.schemas.plain import BY_NAME, LISTS, SINGLE, escaped
from penstock.text.grammars.schemas.rewriting import rewritten

ANY_OBJECT = '{"type": "object"}'
_MAX_DEPTH = 64
_MAX_SEARCH_S = 0.25  # for the part that is at fault
# Between tokens of JSON: nothing, a blank, or a new line and its indentation. Bounded, for a model
# that likes blanks would write nothing else.
_BLANKS = r"( |\r?\n[ \t]{0,40})?"
# Others are notes to the reader, as the standard has it.
FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
# The library's formats have a year 0, a 29th of February in all years and leap seconds at any time,
# which what reads the output (Python's datetime, pydantic) refuses.
_YEAR = r"(?:[1-9]\d{3}|0[1-9]\d\d|00[1-9]\d|000[1-9])"
_LEAP_YEAR = r"(?:\d\d(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = rf"^(?:{_YEAR}-(?:0[13-9]|1[0-2]|02-(?:[01]|2[0-8]))|{_LEAP_YEAR}-02-29)"
_NARROWER = {"date": _DATE, "date-time": _DATE + r"[-\d]*[Tt]..:..:[0-5]", "time": "^..:..:[0-5]"}
_COUNTS = ("Length", "Items", "Properties", "Contains")  # behind min and max
_SCHEMAS_BY_NAME = (*BY_NAME, "$defs", "definitions")


def schema_grammar(text: str, param: str, whitespace: str | None = None) -> dict[str, Any]:
    """What `Rules.part` takes. `whitespace`: a regular expression of what may stand between the
    tokens of JSON."""
    if len(text) > MAX_GRAMMAR_CHARS:
        raise RequestError(
            "invalid_value",
            f"{param}: the schema has {len(text)} characters, at most {MAX_GRAMMAR_CHARS} are "
            "compiled; make it smaller",
            param,
        )
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(
            "invalid_value", f"{param}: the schema is not JSON: {error}", param
        ) from None
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise RequestError(
            "invalid_type", f"{param}: a schema is an object, this is {text[:80]}", param
        )
    schema = _ending(_supported(_adapted(schema, param), param))
    grammar = {"json_schema": _with_options(schema, _BLANKS if whitespace is None else whitespace)}
    if whitespace and (fault := fault_of(json.dumps({"grammars": [grammar]}))) is not None:
        raise RequestError("invalid_value", f"{param}: {fault}", "whitespace_pattern")
    return grammar


def _supported(schema: dict[str, Any], param: str) -> dict[str, Any]:
    """As the library takes it: as it is, or in other words."""
    as_is = schema if _is_composed(schema) else _closed(schema)
    fault = None
    # What `$id` beside `$ref` means depends on the draft. Branches that exclude each other because
    # they are closed may match together as they are.
    is_clear = not _any_part(schema, lambda part: "$ref" in part and "$id" in part)
    if is_clear and _any_part(schema, lambda part: "oneOf" in part):
        fault = fault_of(_as_grammar(schema))
    if is_clear and fault is None and (fault := fault_of(_as_grammar(as_is))) is None:
        return as_is
    try:
        made = rewritten(schema)
        if (other_fault := fault_of(_as_grammar(made))) is None:
            return made
        if fault is None or "Unimplemented" in fault:
            fault = other_fault
        path = _path_of(schema, fault)
    except UnsupportedSchema as error:
        fault, path = str(error), error.path
    raise RequestError(
        "invalid_value",
        f"{param}: {fault} at {path}; leave it out, or write the schema in other keywords",
        f"{param}{path.removeprefix('#').replace('/', '.')}"[:120],
    )


def _ending(schema: dict[str, Any]) -> dict[str, Any]:
    """With searches that end: after the library has seen which branches exclude each other, for
    that is decided by what the schema says."""
    ending: dict[str, Any] = _bounded(schema)
    is_fine = ending == schema or fault_of(_as_grammar(ending)) is None
    return ending if is_fine else schema


def _bounded(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    changed = mapped(schema, _bounded)
    if isinstance(pattern := schema.get("pattern"), str):
        changed["pattern"] = bounded(pattern)
    keys = changed.get("patternProperties")
    # A key that a pattern does not match any more must not be one of those that may be anything.
    is_closed = schema.get("additionalProperties") is False
    if (
        isinstance(keys, dict)
        and is_closed
        and all(map(is_short_key, schema.get("properties", ())))
    ):
        changed["patternProperties"] = {bounded_key(key): one for key, one in keys.items()}
    return changed


def _any_part(schema: dict[str, Any], has: Callable[[dict[str, Any]], bool]) -> bool:
    return has(schema) or any(_any_part(child, has) for _, child in _children(schema))


def _with_options(schema: dict[str, Any], whitespace: str = _BLANKS) -> dict[str, Any]:
    # Some models escape every letter that is not ASCII, as their templates do.
    options: dict[str, Any] = {"json_allow_general_unicode_escapes": True}
    if whitespace:
        options["whitespace_pattern"] = whitespace.replace(r"\s", r"[ \t\n\r]")
    else:
        options["whitespace_flexible"] = False
    return {**schema, "x-guidance": options}


def _as_grammar(schema: dict[str, Any]) -> str:
    return json.dumps({"grammars": [{"json_schema": _with_options(schema)}]})


def _adapted(schema: Any, param: str, depth: int = 0) -> Any:
    """The same as the library reads it: without formats that mean nothing to a grammar, with whole
    numbers as integers."""
    if not isinstance(schema, dict):
        return schema
    if depth > _MAX_DEPTH:
        raise RequestError(
            "invalid_value", f"{param}: the schema is nested more than {_MAX_DEPTH} deep", param
        )
    named = schema.get("properties")
    if isinstance(named, dict) and len(named) > MAX_PROPERTIES:
        raise RequestError(
            "invalid_value",
            f"{param}: an object has {len(named)} properties, at most {MAX_PROPERTIES} are "
            "compiled; make it smaller",
            param,
        )
    adapted = mapped(schema, lambda one: _adapted(one, param, depth + 1))
    if isinstance(name := schema.get("format"), str):
        if name not in FORMATS:
            del adapted["format"]
        elif name in _NARROWER and isinstance(parts := adapted.get("allOf", []), list):
            adapted["allOf"] = [*parts, {"pattern": _NARROWER[name]}]
    for count in _COUNTS:
        for key in (f"min{count}", f"max{count}"):
            if isinstance(limit := schema.get(key), float) and limit.is_integer():
                adapted[key] = int(limit)  # 2.0 is an integer, says the standard
    return adapted


def _is_composed(schema: dict[str, Any]) -> bool:
    """Whether the properties of some object are spread over several schemas."""
    has_parts = any(key in schema for key in ("anyOf", "oneOf", "allOf", "$ref"))
    all_of = schema.get("allOf")
    is_spread = isinstance(all_of, list) and len(all_of) > 1
    return (
        is_spread
        or (has_parts and "properties" in schema)
        or any(_is_composed(child) for _, child in _children(schema))
    )


def _closed(schema: Any) -> Any:
    """Objects with the named properties alone, where the schema does not say: what it allows
    besides, a model fills with whatever comes to its mind. What is valid then was so before."""
    if not isinstance(schema, dict):
        return schema
    closed = mapped(schema, _closed)
    named, required = schema.get("properties"), schema.get("required", [])
    is_open = {"additionalProperties", "patternProperties", "minProperties"} & schema.keys()
    if isinstance(named, dict) and isinstance(required, list) and not is_open:
        closed["additionalProperties"] = any(name not in named for name in required)
    return closed


def mapped(schema: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """The same with every schema in it changed."""
    changed = dict(schema)
    for key in (*_SCHEMAS_BY_NAME, *LISTS, *SINGLE):
        value = schema.get(key)
        if key in _SCHEMAS_BY_NAME and isinstance(value, dict):
            changed[key] = {name: change(one) for name, one in value.items()}
        elif isinstance(value, list):
            changed[key] = [change(one) for one in value]
        elif isinstance(value, dict):
            changed[key] = change(value)
    return changed


def _path_of(schema: dict[str, Any], fault: str) -> str:
    """A JSON pointer to the smallest part that has this fault by itself."""
    shared: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    path, part, deadline = "#", schema, time.monotonic() + _MAX_SEARCH_S
    while True:
        for step, child in _children(part):
            if time.monotonic() > deadline:
                return path
            if find_fault(_as_grammar({**shared, **child})) == fault:
                path, part = f"{path}/{'/'.join(step)}", child
                break
        else:
            return path


def _children(schema: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    for key in (*_SCHEMAS_BY_NAME, *LISTS, *SINGLE):
        value = schema.get(key)
        if key in _SCHEMAS_BY_NAME and isinstance(value, dict):
            found: list[tuple[tuple[str, ...], Any]] = [
                ((key, escaped(name)), one) for name, one in value.items()
            ]
        elif isinstance(value, list):
            found = [((key, str(i)), one) for i, one in enumerate(value)]
        else:
            found = [((key,), value)]
        yield from ((step, one) for step, one in found if isinstance(one, dict))
