"""Arguments that are written one by one, as rules: in tags (`text/tools/xml_call`), or as keywords
of a Python call (`text/tools/python_call`).

Strings in tags stand there as they are, everything else as JSON, and the parser decides by the
types of the schema which it is. So a grammar may only let through what is then read as a value that
the schema allows. What cannot be said of raw text is refused with its path.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from penstock.errors import RequestError
from penstock.text.grammars.json_schema import FORMATS, mapped, schema_grammar
from penstock.text.grammars.rules import ANY_TEXT, Rules, in_regex
from penstock.text.tools.schemas import as_json, resolved, types_of

_ANY = r"(.|\n)"
_NOTES = {
    *("title", "description", "default", "examples", "$comment", "deprecated", "readOnly"),
    *("writeOnly", "$schema", "$id", "$defs", "definitions", "strict"),
}
_OF_TEXT = {"type", "enum", "const", "minLength", "maxLength", "pattern", "format"}
_OF_ARGUMENTS = {"type", "properties", "required", "additionalProperties"}
_CONTAINERS = {"object", "array"}


class ArgumentTags(NamedTuple):
    """What stands around a value, and what else would end it."""

    opening: str  # with {} for the name
    closing: str
    separator: str  # between arguments
    forbidden: str
    tags: tuple[str, ...]  # that may be tokens of their own


def tagged_arguments(
    rules: Rules, tags: ArgumentTags, parameters: Mapping[str, Any] | None, param: str
) -> str:
    """Each argument once, in the order of the schema; those that are not required may be missing.
    A tool without parameters takes any."""
    if parameters is None:
        any_value = f"{_text(rules, tags, (), False)}"
        head, tail = (rules.words(part, *tags.tags) for part in tags.opening.split("{}"))
        key = rules.rule("KEY", r"/[A-Za-z_][A-Za-z0-9_]{0,63}/")
        return f"({head} {key} {tail} {any_value} {rules.words(tags.separator)})*"
    found = []
    for name, one, path in _properties(parameters, param):
        if not re.fullmatch(r"[^<>\n=]{1,256}", name) or name != name.strip():
            raise unsupported(param, path, "such a name cannot be written in a tag")
        value = _value(rules, tags, one, parameters, param, path)
        opening = rules.words(tags.opening.replace("{}", name), *tags.tags)
        argument = f"{opening} {value} {rules.words(tags.separator)}"
        found.append(argument if _is_required(parameters, name) else f"({argument})?")
    return " ".join(found)


def python_arguments(rules: Rules, parameters: Mapping[str, Any] | None, param: str) -> str:
    """The same as keywords with values of JSON, which are read as well as Python's own."""
    comma = rules.words(", ")
    if parameters is None:
        key = rules.rule("KEY", r"/[A-Za-z_][A-Za-z0-9_]{0,63}/")
        one = rules.numbered("argument", f'{key} "=" {rules.part(schema_grammar("{}", param))}')
        return f"({one} ({comma} {one})*)?"
    begins = goes_on = ""  # from an argument on: as the first one, and behind another
    for name, one, path in reversed(_properties(parameters, param)):
        if not name.isidentifier():
            raise unsupported(param, path, "this is no name of Python")
        schema = {} if one is True else one
        value = _json(rules, schema, parameters, f"{param}{path}", in_tags=False)
        first = f"{rules.words(f'{name}=')} {value} {goes_on}"
        if _is_required(parameters, name):
            begins, goes_on = first, f"{comma} {first}"
        else:
            begins = f"({first} | {begins})" if begins else f"({first})?"
            goes_on = f"({comma} {first} | {goes_on})" if goes_on else f"({comma} {first})?"
        begins, goes_on = rules.numbered("first", begins), rules.numbered("next", goes_on)
    return begins


def _properties(parameters: Mapping[str, Any], param: str) -> list[tuple[str, Any, str]]:
    """(name, schema, path), and nothing else may be asked of them."""
    schema = resolved(parameters, parameters)
    _refuse_others(schema, _OF_ARGUMENTS | _NOTES, param, "")
    named, required = schema.get("properties") or {}, schema.get("required") or []
    is_object = schema.get("type", "object") == "object"
    if not is_object or not isinstance(named, dict) or not isinstance(required, list):
        raise RequestError("invalid_value", f"{param}: this is no schema of arguments", param)
    if unknown := [name for name in required if name not in named]:
        raise unsupported(param, "/required", f"{unknown[0]!r} is required and not described")
    return [(name, one, f"/properties/{name}") for name, one in named.items()]


def _is_required(parameters: Mapping[str, Any], name: str) -> bool:
    return name in (resolved(parameters, parameters).get("required") or ())


def _value(
    rules: Rules, tags: ArgumentTags, schema: Any, root: Mapping[str, Any], param: str, path: str
) -> str:
    """With what closes it."""
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise unsupported(param, path, "nothing is allowed there")
    schema, types = resolved(schema, root), types_of(schema, root)
    if types is None:
        # What it looks like is what it is: anything, where nothing is asked of it.
        _refuse_others(schema, _NOTES, param, path)
        return _text(rules, tags, (), False)
    closing = rules.words(tags.closing, *tags.tags)
    if "string" not in types:
        return f"{_json(rules, schema, root, f'{param}{path}')} {closing}"
    containers = bool(types & _CONTAINERS)
    branches = _branches(schema, root, param, path)
    texts = [one for one in branches if "string" in (types_of(one, root) or ())]
    if len(texts) > 1 and "oneOf" in schema:
        raise unsupported(param, f"{path}/oneOf", "two of its branches are texts")
    found = []
    for one in texts:
        _refuse_others(one, _OF_TEXT | _NOTES, param, path)
        if (values := one.get("enum", [one["const"]] if "const" in one else None)) is not None:
            words = _literals(values, types)
            found += [f"{rules.words(word, *tags.tags)} {closing}" for word in words]
        else:
            found.append(_text(rules, tags, _conditions(one, param, path), containers))
    for one in branches:
        kinds = sorted(_CONTAINERS & (types_of(one, root) or set()))
        if kinds and not {"enum", "const"} & one.keys():
            kept = {key: value for key, value in one.items() if key not in _OF_TEXT}
            part = _json(rules, kept | {"type": kinds}, root, f"{param}{path}")
            found.append(f"{part} {closing}")
    if not found:
        raise unsupported(param, path, "none of its values can be written as text")
    return f"({' | '.join(found)})"


def _branches(
    schema: dict[str, Any], root: Mapping[str, Any], param: str, path: str
) -> list[dict[str, Any]]:
    name = "anyOf" if "anyOf" in schema else "oneOf"
    parts = schema.get(name)
    if not isinstance(parts, list):
        return [schema]
    _refuse_others(schema, _NOTES | {name}, param, path)
    return [resolved(one, root) for one in parts if isinstance(one, dict)]


def _json(
    rules: Rules, schema: dict[str, Any], root: Mapping[str, Any], param: str, in_tags: bool = True
) -> str:
    shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
    whole = shared | schema
    return rules.part(schema_grammar(json.dumps(_tagless(whole) if in_tags else whole), param))


def _tagless(schema: Any) -> Any:
    """The same with texts in which no tag ends: it would end the whole value."""
    if not isinstance(schema, dict):
        return schema
    changed, kinds = mapped(schema, _tagless), schema.get("type")
    is_text = kinds == "string" or (isinstance(kinds, list) and "string" in kinds)
    if is_text and not {"pattern", "format", "enum", "const"} & schema.keys():
        changed["pattern"] = r"^(/|<*[^</])*<*$"
    return changed


def _literals(values: Any, types: frozenset[str]) -> list[str]:
    """Those that the parser reads as what they are."""
    found = []
    for value in values if isinstance(values, list) else ():
        word = value if isinstance(value, str) else json.dumps(value)
        read = json.loads(as_json(word, types))
        if type(read) is type(value) and read == value and word:
            found.append(word)
    return found


def _conditions(schema: Mapping[str, Any], param: str, path: str) -> tuple[str, ...]:
    """Regular expressions, all of which the whole text matches."""
    if schema.get("format") in FORMATS:
        raise unsupported(param, f"{path}/format", "texts of a format are not known here")
    least, most = schema.get("minLength"), schema.get("maxLength")
    found = []
    if least or most is not None:
        found.append(f"{_ANY}{{{least or 0},{'' if most is None else most}}}")
    if isinstance(pattern := schema.get("pattern"), str):
        before = "" if pattern.startswith("^") else f"{_ANY}*"
        is_bound = pattern.endswith("$") and not pattern.endswith("\\$")
        middle = pattern.removeprefix("^")[: -1 if is_bound else None].replace("\n", "\\n")
        escaped = re.sub(r"(?<!\\)/", r"\\/", middle)
        found.append(f"{before}({escaped}){'' if is_bound else f'{_ANY}*'}")
    return tuple(found)


def _text(rules: Rules, tags: ArgumentTags, conditions: Sequence[str], not_json: bool) -> str:
    """Raw text and what closes it. `not_json`: it does not begin like an object or a list."""
    tag = tags.closing.strip()
    if not_json:
        conditions = (*conditions, rf"([^ \t\r\n\[{{]{_ANY}*)?")
    if (token_id := rules.special_id(tag)) is not None:
        if not conditions:
            return f"{rules.rule('TEXT', ANY_TEXT)} <[{token_id}]>"
        body = " & ".join(f"/{one}/" for one in conditions)
        return f"{rules.numbered('VALUE', body)} <[{token_id}]>"
    end = in_regex(tags.closing)
    wanted = [f"/({one}){end}/" for one in conditions or (f"{_ANY}*",)]
    # Neither may the tag come earlier, nor what else ends a value.
    unwanted = [rf"/{_ANY}*{in_regex(tag)}{_ANY}+/"]
    if rules.special_id(tags.forbidden) is None:
        unwanted.append(rf"/{_ANY}*{in_regex(tags.forbidden)}{_ANY}*/")
    body = " & ".join((*wanted, *(f"~{one}" for one in unwanted)))
    return rules.numbered("value", body, "[lazy]")


def _refuse_others(schema: Mapping[str, Any], known: set[str], param: str, path: str) -> None:
    if others := sorted(schema.keys() - known):
        raise unsupported(param, f"{path}/{others[0]}", "this keyword cannot be kept there")


def unsupported(param: str, path: str, why: str) -> RequestError:
    return RequestError(
        "unsupported",
        f"{param}: {why}, at #{path}; this model writes arguments one by one. Leave it out, or use "
        'tool_choice "auto" without strict',
        f"{param}{path.replace('/', '.')}"[:120],
    )
