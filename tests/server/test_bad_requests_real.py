"""The malformed requests of `test_bad_requests` to a real server; none reaches the engine."""

from collections.abc import Iterator

import pytest
from server_process import Server
from test_bad_requests import (  # noqa: F401
    client,
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


def test_the_pool_is_empty_and_nothing_was_computed_for_them(server: Server) -> None:
    counters = server.counters()
    assert counters["used_blocks"] == 0
    assert counters["finished"] == counters["generated_tokens"] == 2  # the two good requests
    assert counters["failed"] == counters["aborted"] == 0
    assert "Traceback" not in server.log.read_text()
