"""`GET /openapi.json` and `GET /docs`: the description of the API, for programs and for people.

The page is plain HTML made from the same document, without scripts and without anything from
elsewhere.
"""

import asyncio
import html
import json
import shlex
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from penstock.server.front_page import HEADERS
from penstock.server.state import state_of

Schema = dict[str, Any]
_MAX_DEPTH = 4  # of schemas shown inside others
_FILE_FORM = "-F purpose=batch -F file=@in.jsonl"


async def openapi_json(request: Request) -> Response:
    document = await _document(request)
    return Response(msgspec.json.encode(document), media_type="application/json")


async def docs(request: Request) -> Response:
    document, url = await _document(request), str(request.base_url).rstrip("/")
    page = await asyncio.to_thread(docs_page, document, url, state_of(request).has_key)
    return HTMLResponse(page, headers=HEADERS)


async def _document(request: Request) -> Schema:
    """Made once, when somebody asks; a server starts without it."""
    kept: Schema | None = getattr(request.app.state, "openapi", None)
    if kept is None:
        from penstock.server.openapi.document import openapi_document

        state = state_of(request)
        kept = await asyncio.to_thread(
            openapi_document, request.app.routes, state.model_name, state.has_key
        )
        request.app.state.openapi = kept
    return kept


def docs_page(document: Schema, url: str, has_key: bool) -> str:
    groups: dict[str, list[str]] = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            shown = _operation(document, path, method.upper(), operation, url, has_key)
            groups.setdefault(operation["tags"][0], []).append(shown)
    body = "\n".join(
        f"<h2>{html.escape(name.capitalize())}</h2>\n" + "\n".join(entries)
        for name, entries in groups.items()
    )
    info = document["info"]
    key = "Every request but <code>/health</code> needs <code>Authorization: Bearer KEY</code>."
    return _PAGE.format(
        title=html.escape(info["title"]),
        version=html.escape(info["version"]),
        description=html.escape(info["description"]),
        key=key if has_key else "",
        body=body,
    )


def curl_example(path: str, method: str, operation: Schema, url: str, has_key: bool) -> str:
    parts = ["curl", shlex.quote(f"{url}{path}")]
    if method not in ("GET", "POST") or (method == "POST" and "requestBody" not in operation):
        parts += ["-X", method]
    if has_key and operation.get("security") != []:
        parts += ["-H", '"Authorization: Bearer $KEY"']
    content = operation.get("requestBody", {}).get("content", {})
    if "multipart/form-data" in content:
        parts.append(_FILE_FORM)
    elif (example := content.get("application/json", {}).get("example")) is not None:
        parts += ["-H", "'Content-Type: application/json'", "-d", shlex.quote(json.dumps(example))]
    return " ".join(parts)


def _operation(
    document: Schema, path: str, method: str, operation: Schema, url: str, has_key: bool
) -> str:
    curl = html.escape(curl_example(path, method, operation, url, has_key))
    parts = [f"<pre>{curl}</pre>"]
    if parameters := operation.get("parameters"):
        rows = [
            _row(one["name"], one["schema"], one["description"], one.get("required", False))
            for one in parameters
        ]
        parts.append(_table("Parameters", rows))
    for kind, media in operation.get("requestBody", {}).get("content", {}).items():
        parts.append(f"<h4>Body: {html.escape(kind)}</h4>")
        parts.append(_fields(document, media["schema"], 0))
    for status, response in operation["responses"].items():
        said = html.escape(f"{status}: {response['description']}")
        shown = [
            f"<p>{html.escape(kind)}</p>" + _fields(document, media.get("schema", {}), 0)
            for kind, media in response.get("content", {}).items()
        ]
        parts.append(f"<details><summary>{said}</summary>{''.join(shown)}</details>")
    summary = html.escape(operation["summary"])
    return (
        f'<details id="{operation["operationId"]}"><summary><b>{method}</b> '
        f"<code>{html.escape(path)}</code> {summary}</summary>\n{''.join(parts)}</details>"
    )


def _fields(document: Schema, schema: Schema, depth: int) -> str:
    """A table of the fields of an object; those of objects inside can be unfolded."""
    schema = _resolved(document, schema)
    rows = []
    for name, one in schema.get("properties", {}).items():
        rows.append(_row(name, one, one.get("description", ""), name in schema.get("required", ())))
        inside = [] if depth >= _MAX_DEPTH else _objects_in(document, one)
        rows += [
            f'<tr><td></td><td colspan="2"><details><summary>fields</summary>'
            f"{_fields(document, inner, depth + 1)}</details></td></tr>"
            for inner in inside
        ]
    return _table("", rows) if rows else ""


def _objects_in(document: Schema, schema: Schema) -> list[Schema]:
    found = []
    for one in schema.get("anyOf", [schema]):
        inner = _resolved(document, one)
        inner = _resolved(document, inner.get("items", inner) or {})
        if inner.get("properties"):
            found.append(inner)
    return found


def _resolved(document: Schema, schema: Schema) -> Schema:
    if "$ref" not in schema:
        return schema
    found: Schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return found


def _table(title: str, rows: list[str]) -> str:
    head = f"<h4>{title}</h4>" if title else ""
    return f"{head}<table>{''.join(rows)}</table>"


def _row(name: str, schema: Schema, text: str, is_needed: bool) -> str:
    kind = _kind(schema)
    if schema.get("default") is not None:
        kind += f", default {json.dumps(schema['default'])}"
    if is_needed:
        kind += ", required"
    said = (f"<code>{html.escape(name)}</code>", html.escape(kind), html.escape(text))
    return "<tr>" + "".join(f"<td>{one}</td>" for one in said) + "</tr>"


def _kind(schema: Schema) -> str:
    """A type with its bounds in a few words."""
    if "anyOf" in schema:
        kinds = [_kind(one) for one in schema["anyOf"] if one.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    if "const" in schema:
        return json.dumps(schema["const"])
    if "enum" in schema:
        return " | ".join(json.dumps(one) for one in schema["enum"])
    kind = str(schema.get("type", "any"))
    if kind == "array":
        return f"list of {_kind(schema.get('items') or {})}{_most(schema, 'maxItems')}"
    bounds = [_bound(schema, "minimum", "from"), _bound(schema, "maximum", "to")]
    return " ".join([kind, *filter(None, bounds)]) + _most(schema, "maxProperties")


def _bound(schema: Schema, name: str, word: str) -> str:
    value: Any = schema.get(name)
    return "" if value is None else f"{word} {value}"


def _most(schema: Schema, name: str) -> str:
    return f" (at most {schema[name]})" if name in schema else ""


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 3rem auto }}
pre {{ background: #f3f3f3; color: #111; padding: 1rem; white-space: pre-wrap }}
details {{ margin: .3rem 0 }}
details > details, table {{ margin-left: 1rem }}
summary {{ cursor: pointer }}
td {{ padding: .1rem .8rem .1rem 0; vertical-align: top }}
h4 {{ margin: .5rem 0 0 }}
</style>
</head>
<body>
<h1>{title}</h1>
<p>Penstock {version}. {description} {key}</p>
<p><a href="/openapi.json">/openapi.json</a> says the same to programs.</p>
{body}
</body>
</html>
"""
