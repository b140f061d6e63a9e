"""The application under servers that are not ours: streams take the way that ASGI has for them."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator

import httpx
import pytest
import uvicorn
from http_fakes import OUTPUT, FakePipeline
from waiting import until

from penstock.config.schema import EngineConfig
from penstock.server.app import build_app
from penstock.server.launch import bind
from penstock.server.pipe import QueuedPipe

ASKED = {"prompt": "a", "stream": True, "stream_options": {"include_usage": True}}


def text_of(events: str) -> str:
    *parts, done, rest = events.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    chunks = [json.loads(part.removeprefix("data: ")) for part in parts]
    assert chunks[-1]["usage"]["completion_tokens"] == len(OUTPUT.encode())
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


def test_a_stream_without_any_server():
    app = build_app(FakePipeline(), EngineConfig(model="org/model"))

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.post("/v1/completions", json=ASKED)

    answer = asyncio.run(ask())
    assert answer.status_code == 200 and text_of(answer.text) == OUTPUT


@pytest.fixture
def plain() -> Iterator[tuple[str, FakePipeline]]:
    """Plain uvicorn with its h11 protocol."""
    listener, pipeline = bind("127.0.0.1", 0), FakePipeline()
    app = build_app(pipeline, EngineConfig(model="org/model"))
    server = uvicorn.Server(uvicorn.Config(app, http="h11", lifespan="off", log_config=None))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}", pipeline
    server.should_exit = True
    thread.join(240)


def test_a_stream_under_plain_uvicorn_comes_in_pieces(plain):
    url, pipeline = plain
    with httpx.stream("POST", f"{url}/v1/completions", json=ASKED | {"prompt": "SLOW"}) as answer:
        pieces = answer.iter_raw()
        assert all(next(pieces).startswith(b"data: {") for _ in range(3))  # long before its end
        assert pipeline.num_open == 1
    assert text_of(httpx.post(f"{url}/v1/completions", json=ASKED).text) == OUTPUT


def test_a_client_of_plain_uvicorn_that_leaves_frees_its_request(plain):
    url, pipeline = plain
    with httpx.stream("POST", f"{url}/v1/completions", json=ASKED | {"prompt": "SLOW"}) as answer:
        next(answer.iter_raw())
    until(lambda: pipeline.num_open == 0)
    assert pipeline.aborted == ["SLOW"]


def test_a_slow_server_is_told_of_and_gets_pieces_joined():
    async def run() -> None:
        sent: list[bytes] = []
        may_send = asyncio.Event()

        async def send(message: dict[str, object]) -> None:
            await may_send.wait()
            sent.append(message["body"])  # type: ignore[arg-type]

        pipe, told = QueuedPipe(send), []  # type: ignore[arg-type]
        pipe.on_pause, pipe.on_resume = lambda: told.append("pause"), lambda: told.append("resume")
        for _ in range(100):
            pipe.write(b"x" * 1000)
            await asyncio.sleep(0)
        assert told == ["pause"] and pipe.is_paused
        may_send.set()
        await pipe.flush()
        assert told == ["pause", "resume"] and not pipe.is_paused
        assert b"".join(sent) == b"x" * 100_000 and len(sent) == 2

    asyncio.run(run())
