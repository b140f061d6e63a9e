"""Replies with many log-probabilities: the event loop goes on while they are written."""

import asyncio
import json
import threading
from collections.abc import Callable

import httpx
import pytest
from http_fakes import FakePipeline, running_server

from penstock.server import large_reply
from penstock.server.large_reply import encoded_reply
from penstock.server.sse import DONE, EventStream
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


@pytest.mark.parametrize("path", REQUESTS)
def test_a_stream_written_in_a_thread_is_the_same(monkeypatch, path):
    body = {**REQUESTS[path], "max_tokens": 3, "prompt_logprobs": 2, "stream": True}

    def events() -> list[dict]:
        lines = httpx.post(server.url + path, json=body).text.split("\n")
        assert "data: [DONE]" in lines
        written = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        return [one | {"id": "", "created": 0} for one in written]

    with running_server(FakePipeline()) as server:
        small = events()
        monkeypatch.setattr(large_reply, "_MANY", 0)
        large = events()
    assert len(small) > 6 and small == large


ENTRY = TokenLogprob(token_id=5, logprob=-1.0, rank=1)
DELTAS = [
    TextDelta(index=0, text="a"),
    TextDelta(index=0, text="b", prompt_logprobs=(ENTRY,) * 9_000),
    TextDelta(index=0, text="c"),
]


class Writer:
    """The second event is made once the event loop has gone on."""

    def __init__(self, fails: bool = False) -> None:
        self.fails, self.loop_goes_on = fails, threading.Event()

    def event(self, prompt_index: int, delta: TextDelta) -> bytes:
        assert delta.text != "b" or (not self.fails and self.loop_goes_on.wait(30))
        return delta.text.encode()

    def last_event(self) -> bytes:
        return b"!"


class Generations:
    """Brings all deltas at once."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    async def stream_to(self, write: Callable[[int, TextDelta], None]) -> None:
        asyncio.get_running_loop().call_later(0.01, self._writer.loop_goes_on.set)
        for delta in DELTAS:
            write(0, delta)

    def hold(self) -> None: ...

    release = hold

    async def aclose(self) -> None: ...


def streamed(writer: Writer, client_leaves: bool = False) -> bytes:
    sent = []

    async def send(message) -> None:
        sent.append(message.get("body", b""))

    async def receive():
        if not client_leaves:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    stream = EventStream(Generations(writer), writer)  # type: ignore[arg-type]
    asyncio.run(stream({"type": "http"}, receive, send))
    return b"".join(sent)


def test_the_event_loop_goes_on_while_a_large_event_is_made():
    assert streamed(Writer()) == b"abc!" + DONE


def test_a_large_event_that_cannot_be_made_ends_the_stream_with_an_error():
    written = streamed(Writer(fails=True))
    assert written.startswith(b'adata: {"error"') and written.endswith(DONE)


def test_a_client_that_leaves_while_a_large_event_is_made_gets_no_end():
    assert DONE not in streamed(Writer(), client_leaves=True)
