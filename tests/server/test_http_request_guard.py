"""Web pages of other sites are kept out; every other client goes in as before."""

from collections.abc import Iterator
from types import SimpleNamespace

import httpx
import pytest
from http_fakes import FakePipeline, running_server

from penstock.config.http import HttpConfig
from penstock.server.drain import Drain
from penstock.server.request_guard import RequestGuard, is_loopback

BODY = '{"prompt": "a", "max_tokens": 1}'


@pytest.fixture(scope="module")
def server() -> Iterator[SimpleNamespace]:
    with running_server(FakePipeline(), host="127.0.0.1") as running:
        yield running


def post(server: SimpleNamespace, **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.post(f"{server.url}/v1/completions", content=BODY, headers=named)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", None])
@pytest.mark.parametrize(
    "browser",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:1"},
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site", "origin": "http://other.localhost"},
    ],
)
def test_a_page_of_another_site_cannot_post_without_being_asked(server, kind, browser):
    num_asked = len(server.pipeline.asked)
    answer = post(server, **browser, **({} if kind is None else {"content_type": kind}))
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "cross_site"
    assert "application/json" in answer.json()["error"]["message"]
    assert len(server.pipeline.asked) == num_asked


def test_other_clients_may_send_any_content_type(server):
    assert post(server).status_code == 200
    for kind in ("text/plain", "application/x-www-form-urlencoded", "application/json"):
        assert post(server, content_type=kind).status_code == 200, kind


def test_pages_of_ours_and_pages_that_were_asked_may_post(server):
    own = {"content_type": "text/plain", "origin": server.url}
    assert post(server, **own).status_code == 200
    assert post(server, **own, sec_fetch_site="same-origin").status_code == 200
    asked = {"content_type": "application/json; charset=utf-8", "origin": "https://a.example"}
    assert post(server, **asked, sec_fetch_site="cross-site").status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "x"],
)
def test_on_loopback_a_foreign_host_is_refused(server, host):
    answer = httpx.get(f"{server.url}/v1/models", headers={"host": host})
    assert answer.status_code == 403
    error = answer.json()["error"]
    assert error["code"] == "host_not_allowed"
    assert host in error["message"] and "http_config.allowed_hosts" in error["message"]


@pytest.mark.parametrize(
    "host",
    ["localhost", "LocalHost:8000", "localhost.", "a.localhost:1", "127.0.0.1:9", "[::1]:8000"],
)
def test_on_loopback_its_own_names_and_addresses_are_served(server, host):
    assert httpx.get(f"{server.url}/v1/models", headers={"host": host}).status_code == 200


def test_names_may_be_allowed():
    def status(server: SimpleNamespace, host: str) -> int:
        return httpx.get(f"{server.url}/health", headers={"host": host}).status_code

    allowed = {"allowed_hosts": ["llm.example.com"]}
    for address in ("127.0.0.1", "0.0.0.0"):
        with running_server(FakePipeline(), host=address, http_config=allowed) as server:
            assert status(server, "LLM.example.com:443") == status(server, "10.0.0.1") == 200
            assert status(server, "evil.example") == 403
    anything = {"allowed_hosts": ["*"]}
    with running_server(FakePipeline(), host="127.0.0.1", http_config=anything) as server:
        assert status(server, "evil.example") == 200
    with running_server(FakePipeline(), host="0.0.0.0") as server:
        assert status(server, "evil.example") == 200


@pytest.mark.parametrize("name", ["llm.example.com:443", "http://llm.example.com", ""])
def test_a_name_that_could_never_match_is_refused_at_start(name):
    with pytest.raises(ValueError, match="allowed_hosts"):
        HttpConfig(allowed_hosts=[name])


def test_what_is_loopback():
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "127.8.8.8", "::1")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "llm.example.com")))


def test_a_name_that_was_allowed_before_allows_no_other():
    def scope(host):
        return {"type": "http", "method": "GET", "path": "/", "headers": [(b"host", host)]}

    guard = RequestGuard(None, "127.0.0.1", HttpConfig(), Drain())
    for _ in range(2):
        assert guard._refusal(scope(b"127.0.0.1:80")) is None
        assert guard._refusal(scope(b"evil.example:80")).code == "host_not_allowed"
        assert guard._refusal(scope(b"127.0.0.1.evil.example")).code == "host_not_allowed"
