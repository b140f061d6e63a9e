"""One line in the log for each request, with its true totals and without its words."""

import logging
import re
import socket
import time
from collections.abc import Iterator

import httpx
import pytest
from http_fakes import OUTPUT, FakePipeline, running_server
from starlette.types import Receive, Scope, Send
from waiting import until

from penstock.config.schema import EngineConfig
from penstock.errors import ConfigError
from penstock.server.access_log import AccessLog
from penstock.server.auth import TENANT
from penstock.types.tenant import Tenant

NUM_TOKENS = len(OUTPUT.encode())
CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi SECRET"}]}
CHAT_PATH = "/v1/chat/completions"


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """Waits, as a line is written after the client has its answer."""
    caplog.set_level(logging.INFO, "penstock.access")

    class Lines(list):
        def wait(self, number: int = 1) -> list[str]:
            deadline = time.monotonic() + 240
            while True:
                records = [r for r in caplog.records if r.name == "penstock.access"]
                if len(records) >= number or time.monotonic() > deadline:
                    return [record.getMessage() for record in records]
                time.sleep(0.01)

    yield Lines()


@pytest.fixture
def server() -> Iterator[httpx.Client]:
    with running_server(FakePipeline()) as running, httpx.Client(base_url=running.url) as client:
        client.pipeline = running.pipeline  # type: ignore[attr-defined]
        yield client


LINE = (
    r"POST /v1/chat/completions 200 \d+\.\dms prompt_tokens=\d+ completion_tokens={tokens} "
    r"finish={finish} id={id} client=127\.0\.0\.1:\d+"
)


def test_a_whole_answer(server, lines):
    reply = server.post(CHAT_PATH, json=CHAT).json()
    [line] = lines.wait()
    assert re.fullmatch(LINE.format(tokens=NUM_TOKENS, finish="stop", id=reply["id"]), line), line
    assert f"prompt_tokens={reply['usage']['prompt_tokens']} " in line
    assert "SECRET" not in line and "Once" not in line


def test_a_streamed_answer_is_logged_at_its_end_with_its_totals(server, lines):
    with server.stream("POST", CHAT_PATH, json={**CHAT, "stream": True, "max_tokens": 7}) as reply:
        text = "".join(reply.iter_text())
    [line] = lines.wait()
    answer_id = re.search(r'"id":"(chatcmpl-\w+)"', text)[1]
    assert re.fullmatch(LINE.format(tokens=7, finish="length", id=answer_id), line), line


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_is_a_499_with_what_was_made_for_it(server, lines, stream):
    body = b'{"prompt": "SLOW SECRET", "stream": %s}' % (b"true" if stream else b"false")
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    client = socket.create_connection((server.base_url.host, server.base_url.port), timeout=240)
    client.sendall(head.encode() + body)
    if stream:
        received = b""
        while received.count(b"data: ") < 3:
            received += client.recv(4096)
    else:
        until(lambda: any(one.num_tokens for one in server.pipeline.client.open))
    client.close()
    [line] = lines.wait()
    assert re.match(r"POST /v1/completions 499 \d+\.\dms prompt_tokens=11 ", line), line
    assert " finish=cancelled id=cmpl-" in line and "SECRET" not in line
    num_tokens = int(re.search(r"completion_tokens=(\d+)", line)[1])
    assert 1 <= num_tokens < 4000


def test_reasons_of_several_samples_and_an_engine_that_fails(server, lines):
    server.post("/v1/completions", json={"prompt": ["a", "b"], "n": 2, "max_tokens": 3})
    server.post("/v1/completions", json={"prompt": "FAIL", "stream": True})
    first, failed = lines.wait(2)
    assert " prompt_tokens=2 completion_tokens=12 finish=length " in first
    assert " 200 " in failed and " finish=error " in failed


def test_refusals_and_our_mistakes_are_logged_too(server, lines):
    server.post("/v1/completions", content=b"{")
    server.get("/nowhere")
    server.post("/v1/completions", json={"prompt": "BUG"})
    bad, missing, broken = lines.wait(3)
    assert bad.startswith("POST /v1/completions 400 ") and "tokens" not in bad
    assert missing.startswith("GET /nowhere 404 ")
    assert broken.startswith("POST /v1/completions 500 ")


def test_a_wrong_key_is_logged_and_no_key_is(lines):
    with running_server(FakePipeline(), api_key="right") as running:
        httpx.get(f"{running.url}/v1/models", headers={"authorization": "Bearer wrong"})
        httpx.get(f"{running.url}/v1/models", headers={"authorization": "Bearer right"})
    refused, served = lines.wait(2)
    assert " 401 " in refused and " 200 " in served
    assert "right" not in refused + served and "wrong" not in refused + served


def test_a_path_cannot_write_a_line_of_its_own(server, lines):
    server.get("/a%0AGET%20/b?token=SECRET")
    [line] = lines.wait()
    assert line.startswith("GET /a%0AGET%20/b 404 ") and "SECRET" not in line


def test_probes_and_scrapes_are_logged_at_verbose_only(server, lines, caplog):
    quiet = ("/health", "/health/", "/metrics", "/prometheus/metrics", "/health_generate")
    for path in quiet:
        server.get(path)
    server.get("/version")
    [line] = lines.wait()
    assert line.startswith("GET /version ")
    caplog.set_level(logging.DEBUG, "penstock.access")
    server.get("/health")
    assert lines.wait(2)[1].startswith("GET /health 200 ")


def test_it_can_be_switched_off(lines):
    with running_server(FakePipeline(), http_config={"access_log": False}) as running:
        assert httpx.post(f"{running.url}{CHAT_PATH}", json=CHAT).status_code == 200
        time.sleep(0.1)
    assert lines.wait(0) == []


def test_the_name_of_a_key_is_logged_where_one_is_known(lines):
    import asyncio

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scope[TENANT] = Tenant(name="team-a")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def nothing(*_: object) -> None:
        pass

    scope = {"type": "http", "method": "GET", "path": "/version", "client": ("::1", 5)}
    asyncio.run(AccessLog(app)(scope, nothing, nothing))
    [line] = lines.wait()
    assert line.endswith(" client=::1:5 key=team-a")


@pytest.mark.parametrize("origin", ["example.org", "https://a/path", "http://a b", ""])
def test_an_origin_that_is_none_is_refused(origin):
    with pytest.raises(ConfigError, match="is no origin"):
        EngineConfig(http_config={"allowed_origins": [origin]})


def test_origins_come_as_a_list_or_separated_by_commas():
    asked = EngineConfig(http_config={"allowed_origins": "https://a.org, http://localhost:3000"})
    assert asked.http_config.allowed_origins == ("https://a.org", "http://localhost:3000")
    again = EngineConfig.model_validate(asked.model_dump(mode="json"))
    assert again.http_config == asked.http_config
