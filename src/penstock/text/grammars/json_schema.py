"""JSON Schema -> a grammar, or a `RequestError` with the path of the part that cannot be one.

A keyword that the library does not know is refused, never left out: an output must be valid.
"""

import json
from collections.abc import Iterator
from typing import Any

from penstock.errors import RequestError
from penstock.text.grammars.library import MAX_GRAMMAR_CHARS, fault_of

ANY_OBJECT = '{"type": "object"}'
_MAX_DEPTH = 64
_MAX_PROBES = 2000  # parts of a schema that are tried alone, to find the one at fault
# Between tokens of JSON: nothing, a blank, or a new line and its indentation. Bounded, for a model
# that likes blanks would write nothing else.
_BLANKS = r"( |\r?\n[ \t]{0,40})?"
# Others are notes to the reader, as the standard has it.
_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_LISTS_OF_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SINGLE_SCHEMAS = ("items", "additionalProperties", "additionalItems", "not", "contains")


def schema_grammar(text: str, param: str) -> dict[str, Any]:
    """What `Rules.part` takes."""
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
        ) from (None)
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise RequestError(
            "invalid_type", f"{param}: a schema is an object, this is {text[:80]}", param
        )
    schema = _without_notes(schema, param)
    if (fault := _fault(schema)) is not None:
        path = _path_of(schema, fault)
        raise RequestError(
            "invalid_value",
            f"{param}: {fault} at {path}; leave it out, or write the schema in other keywords",
            f"{param}{path.removeprefix('#').replace('/', '.')}"[:120],
        )
    return {"json_schema": _with_options(schema)}


def _with_options(schema: dict[str, Any]) -> dict[str, Any]:
    # Some models escape every letter that is not ASCII, as their templates do.
    options = {"whitespace_pattern": _BLANKS, "json_allow_general_unicode_escapes": True}
    return {**schema, "x-guidance": options}


def _fault(schema: dict[str, Any]) -> str | None:
    return fault_of(json.dumps({"grammars": [{"json_schema": _with_options(schema)}]}))


def _without_notes(schema: Any, param: str, depth: int = 0) -> Any:
    """The same without formats that mean nothing to a grammar."""
    if not isinstance(schema, dict):
        return schema
    if depth > _MAX_DEPTH:
        raise RequestError(
            "invalid_value", f"{param}: the schema is nested more than {_MAX_DEPTH} deep", param
        )
    kept = dict(schema)
    if isinstance(name := schema.get("format"), str) and name not in _FORMATS:
        del kept["format"]
    for key in (*_SCHEMAS_BY_NAME, *_LISTS_OF_SCHEMAS, *_SINGLE_SCHEMAS):
        value = schema.get(key)
        if key in _SCHEMAS_BY_NAME and isinstance(value, dict):
            kept[key] = {name: _without_notes(one, param, depth + 1) for name, one in value.items()}
        elif isinstance(value, list):
            kept[key] = [_without_notes(one, param, depth + 1) for one in value]
        elif isinstance(value, dict):
            kept[key] = _without_notes(value, param, depth + 1)
    return kept


def _path_of(schema: dict[str, Any], fault: str) -> str:
    """A JSON pointer to the smallest part that has this fault by itself."""
    shared: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    path, part, num_left = "#", schema, _MAX_PROBES
    while True:
        for step, child in _children(part):
            num_left -= 1
            if num_left < 0:
                return path
            if _fault({**shared, **child} if step[0] not in shared else child) == fault:
                path, part = f"{path}/{'/'.join(step)}", child
                break
        else:
            return path


def _children(schema: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    for key in (*_SCHEMAS_BY_NAME, *_LISTS_OF_SCHEMAS, *_SINGLE_SCHEMAS):
        value = schema.get(key)
        if key in _SCHEMAS_BY_NAME and isinstance(value, dict):
            found: list[tuple[tuple[str, ...], Any]] = [
                ((key, _escaped(name)), one) for name, one in value.items()
            ]
        elif isinstance(value, list):
            found = [((key, str(i)), one) for i, one in enumerate(value)]
        else:
            found = [((key,), value)]
        yield from ((step, one) for step, one in found if isinstance(one, dict))


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
