"""Fields that say what an output must look like -> `GuidedDecodingParams`.

OpenAI's `response_format`, with the types that TensorRT-LLM adds; vLLM's `structured_outputs` and
the older `guided_*`. One of them may be given.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any

from pydantic import WithJsonSchema

from penstock.errors import RequestError
from penstock.server.openai.requests.schema import shown
from penstock.types.guided_decoding import KINDS, GuidedDecodingParams

_TYPES = ("text", "json_object", "json_schema", "json", "regex", "ebnf", "structural_tag")
_SCHEMA: dict[str, Any] = {"anyOf": [{"type": "object"}, {"type": "string"}]}
ResponseFormat = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            "type": "object",
            "properties": {
                "type": {"enum": list(_TYPES)},
                "json_schema": {"type": "object"},
                "schema": _SCHEMA,
                "regex": {"type": "string"},
                "ebnf": {"type": "string"},
                "structures": {"type": "array", "items": {"type": "object"}},
                "triggers": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["type"],
        }
    ),
]
_WHITESPACE = "guided_whitespace_pattern"
_GUIDED = {  # vLLM's older fields
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}


def guided_decoding(fields: Mapping[str, Any]) -> GuidedDecodingParams | None:
    """`fields`: those of this module that were given."""
    found = {name: value for name, value in fields.items() if value is not None}
    whitespace = found.pop(_WHITESPACE, None)
    guided = [
        (name, params)
        for name, value in found.items()
        if (params := _READ.get(name, _aliased)(name, value)) is not None
    ]
    if len(guided) > 1:
        names = " and ".join(name for name, _ in guided)
        raise RequestError(
            "invalid_value", f"{names} both say what the output must be; give one", guided[1][0]
        )
    if whitespace is not None:
        if not guided:
            raise RequestError(
                "invalid_value", f"{_WHITESPACE} is of JSON; ask for a schema, too", _WHITESPACE
            )
        return replace(guided[0][1], whitespace_pattern=whitespace)
    return guided[0][1] if guided else None


def _aliased(name: str, value: Any) -> GuidedDecodingParams:
    return GuidedDecodingParams(**{_GUIDED[name]: value}, param=name)


def _response_format(name: str, value: Mapping[str, Any]) -> GuidedDecodingParams | None:
    kind = value.get("type")
    if kind not in _TYPES:
        raise RequestError(
            "invalid_value",
            f"{name}.type is {shown(kind)}, it must be one of {', '.join(_TYPES)}",
            f"{name}.type",
        )
    match kind:
        case "text":
            return None
        case "json_object":
            return GuidedDecodingParams(json_object=True, param=name)
        case "json_schema":
            wrapper = _field(name, value, "json_schema", dict)
            where = f"{name}.json_schema"
            # Some clients send the schema without its wrapper.
            schema = wrapper.get("schema", wrapper if "type" in wrapper else None)
            if schema is None:
                raise _missing(f"{where}.schema")
            return GuidedDecodingParams(json=_checked(where, schema), param=f"{where}.schema")
        case "json":
            schema = _field(name, value, "schema", (dict, str))
            return GuidedDecodingParams(json=schema, param=f"{name}.schema")
        case "regex":
            return GuidedDecodingParams(
                regex=_field(name, value, "regex", str), param=f"{name}.regex"
            )
        case "ebnf":
            return GuidedDecodingParams(
                grammar=_field(name, value, "ebnf", str), param=f"{name}.ebnf"
            )
        case _:
            return GuidedDecodingParams(structural_tag=dict(value), param=name)


def _structured_outputs(name: str, value: Mapping[str, Any]) -> GuidedDecodingParams:
    given = {key: one for key, one in value.items() if one is not None}
    whitespace = given.get("whitespace_pattern")
    if given.pop("disable_any_whitespace", False):
        given["whitespace_pattern"] = whitespace = ""
    unknown = next((key for key in given if key not in (*KINDS, "whitespace_pattern")), None)
    if unknown is not None or not isinstance(whitespace, str | None):
        wrong = unknown or "whitespace_pattern"
        raise RequestError(
            "unsupported",
            f"{name}.{wrong} is not supported so; give one of {', '.join(KINDS)}, and beside "
            "schemas whitespace_pattern or disable_any_whitespace",
            f"{name}.{wrong}",
        )
    return GuidedDecodingParams(**given, param=name)


_READ: Mapping[str, Callable[[str, Any], GuidedDecodingParams | None]] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
}
FIELDS = (*_READ, *_GUIDED, _WHITESPACE)


def _field(name: str, value: Mapping[str, Any], key: str, kind: Any) -> Any:
    if key not in value:
        raise _missing(f"{name}.{key}")
    if not isinstance(value[key], kind):
        raise RequestError(
            "invalid_type", f"{name}.{key} is {shown(value[key])}, of a wrong type", f"{name}.{key}"
        )
    return value[key]


def _checked(where: str, schema: Any) -> Any:
    if not isinstance(schema, dict | bool):
        raise RequestError(
            "invalid_type",
            f"{where}.schema is {shown(schema)}, it must be an object",
            f"{where}.schema",
        )
    return json.dumps(schema)


def _missing(where: str) -> RequestError:
    return RequestError("missing_field", f"the field '{where}' is missing", where)
