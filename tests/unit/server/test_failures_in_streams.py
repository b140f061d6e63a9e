"""What is said of a response that fails after it has begun, and what is logged."""

import logging

import pytest

from penstock.errors import RequestError
from penstock.server.sse import explain_failure


@pytest.mark.parametrize(
    ("error", "status", "num_logged"),
    [(RuntimeError("a bug"), 500, 1), (RequestError("too_long", "9 of 8 tokens"), 400, 0)],
)
def test_only_a_bug_is_logged(
    error: Exception, status: int, num_logged: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        assert explain_failure(error).status == status
    assert len(caplog.records) == num_logged
