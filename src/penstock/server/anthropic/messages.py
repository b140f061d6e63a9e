"""`POST /v1/messages`, Anthropic's Messages API, whole or as a stream; and its `count_tokens`."""

import uuid
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.server.adapters import with_adapter
from penstock.server.anthropic.block_writer import BlockWriter
from penstock.server.anthropic.reply import (
    Message,
    MessageDelta,
    MessageStart,
    MessageStop,
    MessageUsage,
    StopDelta,
    TokenCount,
)
from penstock.server.anthropic.requests import NAMES, CountTokensRequest, MessagesRequest
from penstock.server.auth import on_behalf, tenant_of
from penstock.server.body import read_body
from penstock.server.generations import Generations
from penstock.server.openai.requests.schema import parse
from penstock.server.openai.requests.through_chat import told_as
from penstock.server.respond import respond
from penstock.server.sse import (
    EventStream,
    FramedStream,
    event,
    explain_failure,
    named_event,
)
from penstock.server.state import ServerState, state_of
from penstock.types.outputs import TextDelta, Usage
from penstock.types.request import FinishReason, GenerateInput


async def create_message(request: Request) -> Response | EventStream:
    state = state_of(request)
    defaults = state.pipeline.client.info.default_sampling
    asked, given = await read_body(request, partial(_read, defaults))
    if state.pipeline.chat_format.reasoning is None:  # nothing is thinking, no budget is exceeded
        given = replace(given, sampling=replace(given.sampling, thinking_token_budget=None))
    inputs = on_behalf(tenant_of(request), [given])
    state, inputs = await with_adapter(state, inputs, asked.model)
    with told_as(NAMES):
        generations = await Generations.start(
            state.pipeline, inputs, state.metrics.observe, stream=asked.stream
        )
    responder = MessagesResponder(asked, state, generations)
    return await respond(request, generations, responder, FramedStream if asked.stream else None)


def _read(defaults: Mapping[str, Any], body: Any) -> tuple[MessagesRequest, GenerateInput]:
    asked = parse(MessagesRequest, body)
    chat = asked.chat_request()
    with told_as(NAMES):
        return asked, chat.chat_input(defaults)


async def count_tokens(request: Request) -> Response:
    """Of a prompt as it would be sent to the model."""

    def read(body: Any) -> GenerateInput:
        return parse(CountTokensRequest, body).chat_request().chat_input({})

    given = await read_body(request, read)
    with told_as(NAMES):
        ids, _ = await state_of(request).pipeline.tokenize(given)
    count = TokenCount(input_tokens=len(ids))
    return Response(msgspec.json.encode(count), media_type="application/json")


class MessagesResponder:
    """Writes one message, whole or as events."""

    def __init__(
        self, asked: MessagesRequest, state: ServerState, generations: Generations
    ) -> None:
        self.id = f"msg_{uuid.uuid4().hex}"
        self._model = state.model_name
        self._generations = generations
        max_calls = 1 if asked.calls_one_tool else None
        self._writer = BlockWriter(max_calls, asked.shows_thinking)
        self._stop: StopDelta  # from the last delta on

    async def reply(self) -> bytes:
        [[sample]] = await self._generations.collect()
        self._push(sample)
        message = Message(
            id=self.id,
            model=self._model,
            content=self._writer.blocks,
            stop_reason=self._stop.stop_reason,
            stop_sequence=self._stop.stop_sequence,
            usage=MessageUsage.of(self._generations.usage()),
        )
        return msgspec.json.encode(message)

    def opening(self) -> bytes:
        counts = Usage(self._generations.num_prompt_tokens, 0)  # how many are cached comes later
        begun = Message(id=self.id, model=self._model, usage=MessageUsage.of(counts))
        return named_event(MessageStart(message=begun))

    def event(self, prompt_index: int, delta: TextDelta) -> bytes:
        return b"".join(map(named_event, self._push(delta)))

    async def ending(self, error: Exception | None) -> bytes:
        if error is not None:
            return b"event: error\n" + event(explain_failure(error).as_anthropic_dict())
        usage = MessageUsage.of(self._generations.usage())
        last = MessageDelta(delta=self._stop, usage=usage)
        return named_event(last) + named_event(MessageStop())

    def _push(self, delta: TextDelta) -> list[Any]:
        events = self._writer.push(delta)
        if delta.finish is not None:
            self._stop = _stop(delta, self._writer.has_called)
        return events


def _stop(delta: TextDelta, has_called: bool) -> StopDelta:
    if delta.finish is FinishReason.LENGTH:
        return StopDelta(stop_reason="max_tokens")
    if isinstance(delta.stop_reason, str):
        return StopDelta(stop_reason="stop_sequence", stop_sequence=delta.stop_reason)
    return StopDelta(stop_reason="tool_use" if has_called else "end_turn")
