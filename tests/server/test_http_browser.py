"""What browsers, hurried clients and the curious ask: `/`, one model, slashes, other origins."""

from collections.abc import Iterator
from html.parser import HTMLParser

import httpx
import openai
import pytest
from http_fakes import FakePipeline, make_tokenizer, running_server

from penstock.text.chat import SIMPLE_TEMPLATE

MESSAGES = [{"role": "user", "content": "Hi"}]
BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


@pytest.fixture
def server() -> Iterator[httpx.Client]:
    with running_server(FakePipeline()) as running, httpx.Client(base_url=running.url) as client:
        yield client


def test_a_model_is_found_by_its_id_with_slashes_too(server):
    [listed] = server.get("/v1/models").json()["data"]
    assert server.get("/v1/models/org/model").json() == listed
    assert server.get("/v1/models/org%2Fmodel").json() == listed
    client = openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="x", max_retries=0)
    assert client.models.retrieve("org/model").id == "org/model"


def test_an_unknown_model_is_a_404_that_names_the_one_there_is(server):
    reply = server.get("/v1/models/gpt-4")
    assert reply.status_code == 404
    assert reply.json()["error"]["message"] == "there is no model 'gpt-4', only 'org/model'"


@pytest.mark.parametrize(
    "path", ["/health/", "/version/", "/v1/models/", "/v1/models/org/model/", "/metrics//"]
)
def test_a_slash_at_the_end_means_nothing(server, path):
    assert server.get(path).status_code == 200


def test_a_slash_at_the_end_keeps_the_body(server):
    for path, body in (
        ("/v1/chat/completions/", {"messages": MESSAGES}),
        ("/v1/completions/", {"prompt": "Hi", "stream": True}),
        ("/tokenize/", {"prompt": "Hi"}),
    ):
        assert server.post(path, json=body).status_code == 200


def test_a_slash_does_not_open_a_guarded_path():
    with running_server(FakePipeline(), api_key="k") as running:
        assert httpx.get(f"{running.url}/health/").status_code == 200
        assert httpx.get(f"{running.url}/version/").status_code == 401


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("stream", [True, False])
def test_answers_name_the_model_that_answers_whatever_was_asked_for(server, path, stream):
    asked = {"model": "smollm2", "prompt": "Hi", "messages": MESSAGES, "stream": stream}
    del asked["prompt" if "chat" in path else "messages"]
    reply = server.post(path, json=asked).text
    assert '"model":"org/model"' in reply and "smollm2" not in reply


class _Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


def test_a_browser_gets_a_page_with_the_model_its_state_a_command_and_links(server):
    reply = server.get("/", headers=BROWSER)
    assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/html")
    page = _Page(reply.text)
    assert "org/model" in page.text and "ready" in page.text
    assert f"curl {server.base_url}/v1/chat/completions" in page.text
    links = [attrs["href"] for tag, attrs in page.tags if tag == "a"]
    assert {"/version", "/prometheus/metrics", "/v1/models"} <= set(links)
    for link in links:
        assert server.get(link).status_code == 200
    loading = {"script", "link", "img", "iframe"}
    assert not loading & {tag for tag, _ in page.tags}, "nothing is fetched from anywhere"
    assert "default-src 'none'" in reply.headers["content-security-policy"]


def test_a_page_escapes_what_it_shows():
    name = "<script>alert('x')</script>&"
    with running_server(FakePipeline(), served_model_name=name) as running:
        headers = BROWSER | {"host": '"><script>a'}
        reply = httpx.get(running.url, headers=headers)
    page = _Page(reply.text)
    assert name in page.text and "script" not in {tag for tag, _ in page.tags}


def test_a_program_gets_the_same_as_json(server):
    said = server.get("/").json()
    assert said["model"] == "org/model" and said["status"] == "ready" and said["running"] == 2
    server.headers["accept"] = "application/json"
    assert server.get("/").json() == said


def test_a_page_counts_as_people_do():
    pipeline = FakePipeline()
    with running_server(pipeline) as running:
        assert "2 requests running" in httpx.get(running.url, headers=BROWSER).text
        pipeline.client.counters.running = 1
        assert "1 request running" in httpx.get(running.url, headers=BROWSER).text


def test_a_browser_gets_the_version_over_lines_and_a_program_on_one(server):
    plain, lines = server.get("/version"), server.get("/version", headers=BROWSER)
    assert lines.json() == plain.json()
    assert lines.headers["content-type"] == plain.headers["content-type"] == "application/json"
    assert "\n" not in plain.text and '\n  "limits": {\n' in lines.text


def test_a_browser_that_asks_for_an_icon_gets_none_and_no_error(server):
    reply = server.get("/favicon.ico")
    assert reply.status_code == 204 and not reply.content


def test_an_engine_that_hangs_is_not_called_ready():
    pipeline = FakePipeline()
    pipeline.client.healthy = False
    with running_server(pipeline) as running:
        assert httpx.get(running.url).json()["status"] == "not making progress"


ORIGIN = "https://chat.example.org"
PREFLIGHT = {
    "origin": ORIGIN,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


def test_other_origins_are_not_allowed_by_default(server):
    reply = server.get("/v1/models", headers={"origin": ORIGIN})
    assert "access-control-allow-origin" not in reply.headers
    refused = server.options("/v1/chat/completions", headers=PREFLIGHT)
    assert refused.status_code == 405
    assert "access-control-allow-origin" not in refused.headers


@pytest.mark.parametrize("allowed", [[ORIGIN], ["*"]])
def test_an_allowed_origin_may_ask_first_without_a_key_and_then_with_one(allowed):
    config = {"allowed_origins": allowed}
    with running_server(FakePipeline(), api_key="k", http_config=config) as running:
        url = f"{running.url}/v1/chat/completions"
        asked = httpx.options(url, headers=PREFLIGHT)
        assert asked.status_code == 200
        assert asked.headers["access-control-allow-origin"] in (ORIGIN, "*")
        assert "authorization" in asked.headers["access-control-allow-headers"].lower()
        headers = {"origin": ORIGIN, "authorization": "Bearer k"}
        for stream in (False, True):
            body = {"messages": MESSAGES, "stream": stream}
            reply = httpx.post(url, json=body, headers=headers)
            assert reply.status_code == 200
            assert reply.headers["access-control-allow-origin"] in (ORIGIN, "*")
        without_key = httpx.post(url, json={"messages": MESSAGES}, headers={"origin": ORIGIN})
        assert without_key.status_code == 401
        # so that a page can read why
        assert without_key.headers["access-control-allow-origin"] in (ORIGIN, "*")


def test_another_origin_than_the_allowed_one_is_refused():
    with running_server(FakePipeline(), http_config={"allowed_origins": [ORIGIN]}) as running:
        headers = PREFLIGHT | {"origin": "https://evil.example"}
        reply = httpx.options(f"{running.url}/v1/models", headers=headers)
        assert reply.status_code == 400 and "access-control-allow-origin" not in reply.headers


def test_tools_without_a_place_in_the_template_are_refused_unless_none_shall_be_called():
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    body = {"messages": MESSAGES, "tools": tools}
    with running_server(FakePipeline(make_tokenizer(SIMPLE_TEMPLATE))) as running:
        url = f"{running.url}/v1/chat/completions"
        reply = httpx.post(url, json=body)
        assert reply.status_code == 400
        error = reply.json()["error"]
        assert (error["param"], error["code"]) == ("tools", "unsupported")
        assert 'tool_choice to "none"' in error["message"]
        assert httpx.post(url, json=body | {"tool_choice": "none"}).status_code == 200
