"""A token comes from the engine's message to the connection in one documented chain of calls."""

import asyncio
import itertools
import re
import sys
from pathlib import Path
from types import CodeType, SimpleNamespace

import pytest
from fake_engine import say

import penstock
from penstock.server import generations as chain_page
from penstock.server.generations import Generations
from penstock.server.openai.chat import ChatResponder
from penstock.server.openai.completions import CompletionResponder
from penstock.server.openai.logprobs import TokenNames
from penstock.server.openai.requests.chat import ChatRequest
from penstock.server.openai.requests.completions import CompletionRequest
from penstock.server.openai.requests.schema import parse
from penstock.server.pipe import SocketPipe, offer_pipe
from penstock.server.sse import DONE, EventStream

SOURCE = Path(penstock.__file__).parent
ARCHITECTURE = SOURCE.parents[1] / "docs" / "architecture.md"
ENDLESS = say(itertools.cycle(range(40, 60)))  # each stands for some text
ENDPOINTS = {
    "chat": (ChatRequest, ChatResponder, {"messages": [{"role": "user", "content": "hello"}]}),
    "completions": (CompletionRequest, CompletionResponder, {"prompt": "hello world"}),
}


def documented() -> list[tuple[str, str]]:
    """(function, file) of each station, from the engine to the connection."""
    lines = re.findall(r"^ {4}(\w+\.\w+) +(\S+\.py) ", chain_page.__doc__ or "", re.MULTILINE)
    assert len(lines) >= 4
    return lines


def station(code: CodeType) -> tuple[str, str]:
    return code.co_qualname, str(Path(code.co_filename).relative_to(SOURCE))


class Transport:
    """Remembers what is written and by which calls of ours, the outermost first."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.calls: list[list[tuple[str, str]]] = []

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes) -> None:
        calls, frame = [], sys._getframe(1)
        while frame is not None:
            if Path(frame.f_code.co_filename).is_relative_to(SOURCE):
                calls.insert(0, station(frame.f_code))
            frame = frame.f_back
        self.written.append(data)
        self.calls.append(calls)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_streamed_token_takes_the_documented_chain_of_calls(serve, run, tokenizer, endpoint):
    schema, responder_of, body = ENDPOINTS[endpoint]
    transport, sent = Transport(), []

    async def send(message) -> None:
        sent.append(message)

    async def receive():
        await asyncio.Event().wait()  # the client stays

    async def scenario() -> None:
        async with serve(ENDLESS) as (pipeline, _):
            asked = parse(schema, {**body, "stream": True, "max_tokens": 12})
            given = asked.chat_input({}) if endpoint == "chat" else asked.inputs({})[0]
            state = SimpleNamespace(names=TokenNames(tokenizer), model_name="m", pipeline=pipeline)
            generations = await Generations.start(pipeline, [given], lambda _: None, stream=True)
            scope: dict[str, object] = {"type": "http"}
            offer_pipe(scope, SocketPipe(transport, lambda: False))  # type: ignore[arg-type]
            responder = responder_of(asked, state, generations)  # type: ignore[arg-type]
            await EventStream(generations, responder)(scope, receive, send)

    run(scenario())
    assert b"".join(transport.written).count(b"data: ") >= 12 and sent[-1]["body"] == DONE
    chain = documented()
    from_the_engine = [calls for calls in transport.calls if chain[0] in calls]
    assert from_the_engine
    for calls in from_the_engine:
        assert calls[calls.index(chain[0]) :] == chain


def test_no_two_stations_share_a_name_and_the_walk_names_them() -> None:
    names = [name for name, _ in documented()]
    assert len({name.rpartition(".")[2] for name in names}) == len(names)
    walk = ARCHITECTURE.read_text()
    assert [name for name in names if f"`{name}`" not in walk] == []
