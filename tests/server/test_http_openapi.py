"""`/openapi.json` and `/docs` against the server that they describe, by validators of others."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import jsonschema
import openapi_spec_validator
import pytest
from http_fakes import FakePipeline, running_server
from msgspec.structs import replace

from penstock.config.schema import EngineConfig
from penstock.server.app import build_app
from penstock.server.openapi.document import openapi_document
from penstock.server.openapi.routes import ROUTES
from penstock.types.pooling import Task

KEY = {"authorization": "Bearer secret"}
REQUEST_PATHS = {
    "ChatRequest": "/v1/chat/completions",
    "CompletionRequest": "/v1/completions",
    "ResponsesRequest": "/v1/responses",
    "MessagesRequest": "/v1/messages",
}
MEDIA = "application/json"


@pytest.fixture(scope="module")
def pipeline() -> FakePipeline:
    return FakePipeline()


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, pipeline: FakePipeline
) -> Iterator[httpx.Client]:
    http = {"files_dir": str(tmp_path_factory.mktemp("files") / "files")}
    with (
        running_server(pipeline, api_key="secret", http_config=http) as running,
        httpx.Client(base_url=running.url, headers=KEY) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def document(server: httpx.Client) -> dict[str, Any]:
    return server.get("/openapi.json").json()


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation


def check(document: dict[str, Any], schema: dict[str, Any], value: Any) -> None:
    whole = {**schema, "components": document["components"]}
    jsonschema.Draft202012Validator(whole).validate(value)


def answer_schema(document: dict[str, Any], method: str, path: str, status: int = 200):
    operation = document["paths"][path][method.lower()]
    return operation["responses"][str(status)]["content"][MEDIA]["schema"]


def routes_of_app() -> list[Any]:
    client = SimpleNamespace(
        counters=None, drain_iterations=None, info=SimpleNamespace(max_seq_len=1)
    )
    return build_app(SimpleNamespace(client=client, tokenizer=None), EngineConfig()).routes  # type: ignore[arg-type]


@pytest.mark.parametrize("has_key", [True, False])
def test_a_validator_finds_nothing_wrong(has_key):
    openapi_spec_validator.validate(openapi_document(routes_of_app(), "org/model", has_key))


def test_every_route_is_described_and_nothing_else(document):
    there = {
        (method, re.sub(r":\w+}", "}", route.path))
        for route in routes_of_app()
        for method in route.methods - {"HEAD"}
    }
    assert {(method, path) for method, path, _ in operations(document)} == there
    assert set(ROUTES) == there


def test_a_route_without_an_entry_is_described_by_its_docstring():
    from starlette.routing import Route

    async def fresh(request: object) -> None:
        """Does a new thing.

        In a new way.
        """

    document = openapi_document([Route("/fresh/{one}", fresh, methods=["PUT"])], "m", False)
    openapi_spec_validator.validate(document)
    assert document["paths"]["/fresh/{one}"]["put"]["summary"] == "Does a new thing"


def test_every_field_of_a_request_has_a_description(document):
    schemas = document["components"]["schemas"]
    requests = [name for name in schemas if name.endswith("Request")] + ["StreamOptions"]
    assert len(requests) >= 6
    bare = [
        f"{name}.{field}"
        for name in requests
        for field, schema in schemas[name]["properties"].items()
        if not schema.get("description")
    ]
    assert bare == []


def test_bounds_are_those_of_the_server(document, server):
    """A step beyond each bound is refused by the server, too, with the field's name."""
    num_tried = 0
    for name, path in REQUEST_PATHS.items():
        base = ROUTES["POST", path].example
        for field, schema in document["components"]["schemas"][name]["properties"].items():
            for kind in schema.get("anyOf", [schema]):
                if kind.get("type") not in ("integer", "number"):
                    continue
                beyond = [
                    kind[one] + by for one, by in (("minimum", -1), ("maximum", 1)) if one in kind
                ]
                for value in beyond:
                    needs = {}
                    if field == "top_logprobs" and name == "ChatRequest":
                        needs = {"logprobs": True}
                    elif field == "top_logprobs":
                        needs = {"include": ["message.output_text.logprobs"]}
                    answer = server.post(path, json={**base, **needs, field: value})
                    assert answer.status_code == 400, (path, field, value)
                    body_schema = document["components"]["schemas"][name]
                    with pytest.raises(jsonschema.ValidationError):
                        check(document, body_schema, {**base, field: value})
                    num_tried += 1
    assert num_tried > 50


def test_examples_are_valid_and_answered_as_described(document, server, pipeline):
    form = {"file": ("in.jsonl", b"{}")}
    uploaded = server.post("/v1/files", files=form, data={"purpose": "batch"}).json()
    check(document, answer_schema(document, "POST", "/v1/files"), uploaded)
    num_examples = 0
    for method, path, operation in operations(document):
        media = operation.get("requestBody", {}).get("content", {}).get(MEDIA)
        if media is None:
            continue
        example = media["example"]
        check(document, media["schema"], example)
        if "lora_name" in example:  # this server lets nobody load any
            assert server.request(method, path, json=example).status_code == 403
            num_examples += 1
            continue
        if "input_file_id" in example:
            example = {**example, "input_file_id": uploaded["id"]}
        task = Task.EMBED if operation["tags"] == ["pooling"] else Task.GENERATE
        pipeline.client.info = replace(pipeline.client.info, task=task, hidden_size=4)
        answer = server.request(method, path, json=example)
        assert answer.status_code == 200, answer.text
        check(document, answer_schema(document, method, path), answer.json())
        with pytest.raises(jsonschema.ValidationError):
            check(document, media["schema"], {**example, "unknown": 1})
        num_examples += 1
    assert num_examples == sum(bool(text.example) for text in ROUTES.values()) >= 5


def test_other_answers_are_as_described(document, server):
    form = {"file": ("in.jsonl", b"{}")}
    file = server.post("/v1/files", files=form, data={"purpose": "batch"}).json()
    asked = {"endpoint": "/v1/completions", "completion_window": "24h"}
    batch = server.post("/v1/batches", json={**asked, "input_file_id": file["id"]}).json()
    response = server.post("/v1/responses", json={"input": "Hi"}).json()
    names = {"model": "org/model", "file_id": file["id"], "batch_id": batch["id"]}
    names["response_id"] = response["id"]
    num_checked = 0
    for method, path, operation in operations(document):
        content = operation["responses"].get("200", {}).get("content", {})
        schema = content.get(MEDIA, {}).get("schema")
        if method == "GET" and schema is not None:
            answer = server.get(path.format(**names))
            assert answer.status_code == 200
            check(document, schema, answer.json())
            num_checked += 1
    assert num_checked >= 11
    chat = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
    for path, body in (
        ("/v1/chat/completions", chat),
        ("/v1/completions", {"prompt": "Hi", "stream": True}),
    ):
        content = document["paths"][path]["post"]["responses"]["200"]["content"]
        events = server.post(path, json=body).text.split("\n\n")
        chunks = [json.loads(one.removeprefix("data: ")) for one in events[:-2]]
        assert len(chunks) > 5 and events[-2] == "data: [DONE]"
        for chunk in chunks:
            check(document, content["text/event-stream"]["schema"], chunk)


@pytest.mark.parametrize(
    "path, body",
    [
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 99}),
    ],
)
def test_named_events_are_as_described(document, server, path, body):
    content = document["paths"][path]["post"]["responses"]["200"]["content"]
    *events, end = server.post(path, json={**body, "stream": True}).text.split("\n\n")
    assert len(events) > 8 and end == ""
    for name, data in (one.split("\n") for one in events):
        chunk = json.loads(data.removeprefix("data: "))
        check(document, content["text/event-stream"]["schema"], chunk)
        assert name == f"event: {chunk['type']}"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
def test_errors_are_as_described(document, server, path):
    def body(words: str, **changes: Any) -> dict[str, Any]:
        if path == "/v1/completions":
            return {"prompt": words, **changes}
        return {"messages": [{"role": "user", "content": words}], "max_tokens": 99, **changes}

    for status, asked, headers in (
        (400, body("Hi", temperature=-1), {}),
        (401, body("Hi"), {"authorization": "Bearer wrong"}),
        (429, body("REFUSE"), {}),
        (503, body("FAIL"), {}),
        (500, body("BUG"), {}),
    ):
        answer = server.post(path, json=asked, headers=headers)
        assert answer.status_code == status
        check(document, answer_schema(document, "POST", path, status), answer.json())


def test_the_key_is_asked_for_where_the_server_asks(document):
    assert document["security"] == [{"key": []}]
    open_paths = {path for _, path, one in operations(document) if one.get("security") == []}
    assert open_paths == {"/health"}
    assert openapi_document(routes_of_app(), "m", has_key=False)["security"] == []


def test_the_page_shows_every_route_and_needs_nothing_from_elsewhere(document, server):
    answer = server.get("/docs")
    page = answer.text
    assert answer.headers["content-type"].startswith("text/html")
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")
    assert "<script" not in page and "@import" not in page and "<link" not in page
    here = str(server.base_url).rstrip("/")
    assert {url for url in re.findall(r"https?://[^/\s'\"<&]+", page)} == {here}
    for method, path, operation in operations(document):
        assert f"<b>{method}</b> <code>{path}</code>" in page
        assert f'id="{operation["operationId"]}"' in page
    assert "from 0.0 to 100.0" in page  # temperature
    assert "/docs" in server.get("/", headers={"accept": "text/html"}).text
    assert "/docs" in server.get("/").json()["links"]


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_the_commands_of_the_page_work(server, tmp_path):
    import html

    (tmp_path / "in.jsonl").write_text("{}\n")
    commands = [
        html.unescape(one) for one in re.findall(r"<pre>(.*?)</pre>", server.get("/docs").text)
    ]
    assert len(commands) == len(ROUTES)
    for command in commands:
        extra = " -s -o /dev/null -w '%{http_code}'"
        done = subprocess.run(
            ["bash", "-c", command.replace("curl ", f"curl -g{extra} ", 1)],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={"KEY": "secret", "PATH": "/usr/bin:/bin"},
            timeout=60,
            check=False,
        )
        has_id = "{" in command.split("'")[1] if "'" in command else False
        expected = {"404"} if has_id or "input_file_id" in command else {"200", "204"}
        if re.search("/embeddings|score|rerank", command):
            expected = {"400"}  # of a model that generates
        if "lora_name" in command:  # this server lets nobody load any
            expected = {"403"}
        assert done.stdout in expected, (command, done.stdout, done.stderr)
