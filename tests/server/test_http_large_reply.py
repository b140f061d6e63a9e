"""Replies with many log-probabilities: the event loop goes on while they are written."""

import asyncio
import threading

import httpx
import pytest
from http_fakes import FakePipeline, running_server

from penstock.server.openai import large_reply
from penstock.server.openai.large_reply import encoded_reply
from penstock.types.outputs import TextDelta, TokenLogprob

MESSAGES = [{"role": "user", "content": "Hi"}]
REQUESTS = {
    "/v1/completions": {"prompt": [[5, 6, 7], [8, 9]], "n": 2, "logprobs": 2, "echo": True},
    "/v1/chat/completions": {"messages": MESSAGES, "n": 2, "logprobs": True, "top_logprobs": 2},
}


@pytest.mark.parametrize(
    ("num_entries", "num_samples", "is_aside"), [(1, 1, False), (9_000, 1, True), (200, 128, True)]
)
def test_a_large_reply_is_written_in_a_thread(num_entries, num_samples, is_aside):
    entry = TokenLogprob(token_id=5, logprob=-1.0, rank=1)
    samples = [TextDelta(index=0, prompt_logprobs=(entry,) * num_entries)]
    samples += [TextDelta(index=index) for index in range(1, num_samples)]
    written_in = []

    def encode() -> bytes:
        written_in.append(threading.current_thread())
        return b"{}"

    assert asyncio.run(encoded_reply([samples], encode)) == b"{}"
    assert (written_in[0] is not threading.main_thread()) == is_aside


@pytest.mark.parametrize("path", REQUESTS)
def test_a_reply_written_in_a_thread_is_the_same(monkeypatch, path):
    body = {**REQUESTS[path], "max_tokens": 3, "prompt_logprobs": 2, "request_id": "same"}
    with running_server(FakePipeline()) as server:
        small = httpx.post(server.url + path, json=body).json()
        monkeypatch.setattr(large_reply, "_MANY", 0)
        large = httpx.post(server.url + path, json=body).json()
    assert small["choices"] and len(small["choices"]) == len(large["choices"])
    assert small | {"created": 0} == large | {"created": 0}
