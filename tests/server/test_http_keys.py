"""Several keys over HTTP: who is who, what each may ask for, and nothing of a key comes back."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from http_fakes import FakePipeline, running_server

from penstock.types.tenant import PROBE

ALICE, BOB, SINGLE = "sk-alice-0123456789", "sk-bob-0123456789ab", "single"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    path.write_text(
        f"alice: {ALICE}\nbob: {{key: {BOB}, allow_priority: true, allow_metrics: true}}\n"
    )
    path.chmod(0o600)
    settings = {"api_key": SINGLE, "access_config": {"api_keys_file": str(path)}}
    with (
        running_server(FakePipeline(), **settings) as running,
        httpx.Client(base_url=running.url) as client,
    ):
        client.pipeline = running.pipeline  # type: ignore[attr-defined]
        yield client


def ask(server: httpx.Client, key: str, path: str = "/v1/completions", **body: object):
    body = {"prompt": "Hi", "max_tokens": 2} | body
    if "chat" in path:
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2} | body
        del body["prompt"]
    return server.post(path, json=body, headers={"authorization": f"bearer {key}"})


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_request_comes_on_behalf_of_its_key(server, path):
    for key, name in ((SINGLE, "api_key"), (ALICE, "alice"), (BOB, "bob")):
        assert ask(server, key, path).status_code == 200
        assert server.pipeline.asked[-1].tenant.name == name
    scopes = {one.tenant.prefix_scope for one in server.pipeline.asked[-3:]}
    assert len(scopes) == 3 and None not in scopes


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_the_scheme_may_be_written_in_any_case(server, scheme):
    answer = server.get("/v1/models", headers={"authorization": f"{scheme} {ALICE}"})
    assert answer.status_code == 200


@pytest.mark.parametrize("value", [None, f"Basic {ALICE}", "Bearer wrong", f"Bearer {ALICE} x"])
def test_without_a_known_key_nothing_is_answered_but_health(server, value):
    headers = {} if value is None else {"authorization": value}
    answer = server.get("/v1/models", headers=headers)
    assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert ALICE not in answer.text
    assert server.get("/health", headers=headers).status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_priority_above_zero_is_for_keys_that_may_have_one(server, path):
    refused = ask(server, ALICE, path, priority=3)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["param"], error["code"]) == ("priority", "priority_not_allowed")
    assert "'alice' may send at most 0" in error["message"]
    assert "allow_priority" in error["message"]
    assert ask(server, ALICE, path, priority=-3).status_code == 200  # only behind its own
    assert ask(server, BOB, path, priority=3).status_code == 200
    assert server.pipeline.asked[-1].priority == 3


def test_metrics_are_for_keys_that_may_read_them(server):
    for path in ("/metrics", "/prometheus/metrics"):
        refused = server.get(path, headers={"authorization": f"Bearer {ALICE}"})
        assert refused.status_code == 403 and "allow_metrics" in refused.json()["error"]["message"]
        for key in (BOB, SINGLE):
            found = server.get(path, headers={"authorization": f"Bearer {key}"})
            assert found.status_code == 200


def test_nothing_of_a_key_is_shown(server):
    for path in ("/version", "/v1/models", "/prometheus/metrics", "/metrics"):
        answer = server.get(path, headers={"authorization": f"Bearer {BOB}"})
        assert answer.status_code == 200
        for secret in (ALICE, BOB, SINGLE):
            assert secret not in answer.text


def test_one_request_cannot_take_the_whole_queue(server):
    """510 bytes filled all places: prompts times samples."""
    refused = ask(server, ALICE, prompt=["a"] * 64, n=128)
    assert refused.status_code == 400
    assert "make 8192 sequences" in refused.json()["error"]["message"]


def test_a_health_check_is_nobodys_request(server):
    answer = server.get("/health_generate", headers={"authorization": f"Bearer {ALICE}"})
    assert answer.status_code == 200
    assert server.pipeline.asked[-1].tenant.index == PROBE


def test_without_keys_a_priority_above_zero_is_refused_until_switched_on():
    for allowed, status in ((False, 400), (True, 200)):
        settings = {"access_config": {"allow_priority": allowed}}
        with running_server(FakePipeline(), **settings) as running:
            body = {"prompt": "Hi", "max_tokens": 1, "priority": 1}
            answer = httpx.post(f"{running.url}/v1/completions", json=body)
            assert answer.status_code == status


def test_a_file_of_keys_is_read_once(tmp_path: Path):
    path = tmp_path / "keys.yaml"
    path.write_text(f"alice: {ALICE}")
    path.chmod(0o600)
    with running_server(FakePipeline(), access_config={"api_keys_file": str(path)}) as running:
        path.unlink()
        headers = {"authorization": f"Bearer {ALICE}"}
        assert httpx.get(f"{running.url}/v1/models", headers=headers).status_code == 200
