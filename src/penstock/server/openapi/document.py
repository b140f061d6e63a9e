"""`openapi_document`: the routes of an application -> OpenAPI 3.1.

Requests are described by the schemas that check them, responses by the records that are written,
so neither can differ from what the server does. Texts are in `routes` and `fields`.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from starlette.routing import BaseRoute, Route

import penstock
from penstock.server.openai.requests.schema import Strict
from penstock.server.openapi.fields import FIELDS
from penstock.server.openapi.routes import (
    PATH_PARAMETERS,
    QUERY_PARAMETERS,
    ROUTES,
    RouteText,
)
from penstock.types.sampling import BOUNDS

_REF = "#/components/schemas/{}"
_BOUNDS = {**BOUNDS, "best_of": BOUNDS["n"]}
_CONVERTOR = re.compile(r"{(\w+):\w+}")
_OPEN_PATHS = ("/health",)
_ERRORS = {
    400: "The request is wrong; the message says what and the way out",
    401: "The API key is missing or wrong",
    403: "This key, host or web page may not",
    404: "There is no such thing",
    408: "The body did not arrive in time",
    413: "The body is too large",
    429: "The server is full; Retry-After says when to try again",
    500: "A failure of the server",
    503: "The engine does not answer, or the server is leaving",
    507: "The disk is full",
}
Schema = dict[str, Any]


def openapi_document(routes: Iterable[BaseRoute], model: str, has_key: bool) -> Schema:
    """`has_key`: clients must send one."""
    paths: dict[str, Schema] = {}
    texts: list[RouteText] = []
    for route in routes:
        if not isinstance(route, Route):
            continue
        path = _CONVERTOR.sub(r"{\1}", route.path)
        for method in sorted((route.methods or set()) - {"HEAD"}):
            text = ROUTES.get((method, path)) or RouteText(summary=_first_line(route))
            texts.append(text)
            paths.setdefault(path, {})[method.lower()] = _operation(method, path, text, has_key)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": f"Penstock: {model}",
            "version": penstock.__version__,
            "description": "An OpenAI-compatible API. A field that is not known is refused, with "
            "the nearest name; null stands for a field that is not given.",
        },
        "servers": [{"url": "/"}],
        "security": [{"key": []}] if has_key else [],
        "tags": [{"name": name} for name in dict.fromkeys(text.group for text in texts)],
        "paths": paths,
        "components": {
            "schemas": _schemas(texts),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _first_line(route: Route) -> str:
    said = (route.endpoint.__doc__ or route.name).strip().splitlines()[0]
    return said.rstrip(".")


def _operation(method: str, path: str, text: RouteText, has_key: bool) -> Schema:
    name = re.sub(r"\W+", "_", f"{method.lower()}_{path}").strip("_")
    said: Schema = {"operationId": name, "summary": text.summary, "tags": [text.group]}
    if path in _OPEN_PATHS:
        said["security"] = []
    parameters = [
        {
            "name": one,
            "in": "path",
            "required": True,
            "schema": {"type": "string"},
            "description": PATH_PARAMETERS.get(one, one),
        }
        for one in re.findall(r"{(\w+)}", path)
    ]
    for one in text.query:
        schema, description = QUERY_PARAMETERS[one]
        entry = {"name": one, "in": "query", "schema": schema, "description": description}
        parameters.append(entry)
    if parameters:
        said["parameters"] = parameters
    if (body := _request_body(text)) is not None:
        said["requestBody"] = body
    errors = {*text.errors, 500, *([401] if has_key and path not in _OPEN_PATHS else [])}
    said["responses"] = _success(text) | {str(one): _error(one, text) for one in sorted(errors)}
    return said


def _request_body(text: RouteText) -> Schema | None:
    if text.request is not None:
        media: Schema = {"schema": {"$ref": _REF.format(text.request.__name__)}}
        if text.example:
            media["example"] = text.example
        return {"required": True, "content": {"application/json": media}}
    if not text.form:
        return None
    kinds = {"file": {"type": "string", "format": "binary"}, "purpose": {"const": "batch"}}
    properties = {one: {**kinds[one], "description": FIELDS[one]} for one in text.form}
    schema = {"type": "object", "properties": properties, "required": list(text.form)}
    return {"required": True, "content": {"multipart/form-data": {"schema": schema}}}


def _success(text: RouteText) -> Schema:
    if text.response == "":
        return {"204": {"description": "Nothing"}}
    content: Schema
    if isinstance(text.response, str):
        content = {text.response: {}}
    else:
        schema = {"$ref": _REF.format(text.response.__name__)}
        content = {"application/json": {"schema": schema}}
    if text.events:
        kinds = [{"$ref": _REF.format(one.__name__)} for one in text.events]
        events: Schema = kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
        content["text/event-stream"] = {"schema": events}
    return {"200": {"description": "The answer", "content": content}}


def _error(status: int, text: RouteText) -> Schema:
    schema = {"$ref": _REF.format(text.error_record.__name__)}
    return {"description": _ERRORS[status], "content": {"application/json": {"schema": schema}}}


def _schemas(texts: Iterable[RouteText]) -> dict[str, Schema]:
    texts = list(texts)
    records = [one for text in texts for one in (text.response, text.error_record, *text.events)]
    kinds = {one for one in records if isinstance(one, type)}
    _, found = msgspec.json.schema_components(kinds, ref_template=_REF.format("{name}"))
    schemas: dict[str, Schema] = dict(found)
    for request in {text.request for text in texts} - {None}:
        assert request is not None
        for name, schema in request_schemas(request).items():
            assert schemas.setdefault(name, schema) == schema, f"two schemas are called {name}"
    return dict(sorted(schemas.items()))


def request_schemas(request: type[Strict]) -> dict[str, Schema]:
    """Of a body and of the objects in it, by name."""
    whole = request.model_json_schema(ref_template=_REF.format("{model}"))
    schemas: dict[str, Schema] = whole.pop("$defs", {})
    schemas[request.__name__] = whole
    refused: Mapping[str, str] = getattr(request, "UNSUPPORTED", {})
    for schema in schemas.values():
        schema.pop("description", None)
        needed = schema.get("required", ())
        schema["properties"] = {
            name: _property(name, one, refused, name in needed)
            for name, one in schema["properties"].items()
        }
    return schemas


def _property(name: str, schema: Schema, refused: Mapping[str, str], is_needed: bool) -> Schema:
    schema = {key: value for key, value in schema.items() if key != "title"}
    default, has_default = schema.pop("default", None), "default" in schema
    kinds: list[Schema] = schema.pop("anyOf", None) or [schema]
    kinds = [_bounded(one, _BOUNDS.get(name)) for one in kinds]
    if not is_needed and {"type": "null"} not in kinds:
        kinds.append({"type": "null"})  # stands for a field that is not given
    whole: Schema = kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
    text = f"Not supported: {refused[name]}." if name in refused else FIELDS.get(name, "")
    if text:
        whole = {**whole, "description": text}
    return {**whole, "default": default} if has_default else whole


def _bounded(schema: Schema, bound: tuple[float, float | None] | None) -> Schema:
    """With the bounds of `SamplingParams`, which checks what the schema of the body lets pass."""
    if bound is None or schema.get("type") not in ("integer", "number"):
        return schema
    low, high = bound
    schema = {**schema, "minimum": low}
    return schema if high is None else {**schema, "maximum": high}
