"""The malformed requests of `test_bad_requests` to a real server; none reaches the engine."""

from collections.abc import Iterator

import pytest
from server_process import Server
from test_bad_requests import (  # noqa: F401
    CASES,
    client,
    sent,
    test_a_bad_request_is_refused_with_a_reason,
    test_the_server_still_answers_afterwards,
)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("tiny") as server:
        yield server


@pytest.fixture(scope="module")
def base_url(server: Server) -> str:
    return server.url


def test_the_pool_is_empty_and_nothing_is_computed_for_them(server, client):  # noqa: F811
    before = server.counters()
    for name in CASES:
        sent(client, name)
    after = server.counters()
    assert after["used_blocks"] == 0
    for what in ("steps", "prompt_tokens", "generated_tokens", "finished", "failed", "aborted"):
        assert after[what] == before[what], what
    assert "Traceback" not in server.log.read_text()


@pytest.mark.parametrize(
    ("path", "field", "body", "said"),
    [
        ("/v1/completions", "suffix", {"prompt": "a", "suffix": "b"}, "filling in the middle"),
        (
            "/v1/chat/completions",
            "chat_template",
            {"messages": [{"role": "user", "content": "a"}], "chat_template": "{{ 1 }}"},
            "--trust_request_chat_template",
        ),
        (
            "/tokenize",
            "chat_template",
            {"messages": [{"role": "user", "content": "a"}], "chat_template": "{{ 1 }}"},
            "--trust_request_chat_template",
        ),
    ],
)
def test_what_this_server_or_model_cannot_do_is_refused_by_name(
    client,  # noqa: F811
    path,
    field,
    body,
    said,
):
    reply = client.post(path, json=body)
    assert reply.status_code == 400
    error = reply.json()["error"] if "error" in reply.json() else reply.json()
    assert error["param"] == field and said in error["message"]
