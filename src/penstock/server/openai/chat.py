"""`POST /v1/chat/completions`: messages in, the assistant's message out, whole or as a stream."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from penstock.server.adapters import with_adapter
from penstock.server.auth import on_behalf, tenant_of
from penstock.server.body import read_body
from penstock.server.generations import Generations
from penstock.server.large_reply import encoded, encoded_reply
from penstock.server.openai.logprobs import chat_logprobs, prompt_logprobs
from penstock.server.openai.reply import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatMessage,
    ChatResponse,
    Function,
    FunctionDelta,
    ToolCall,
    ToolCallChunk,
    Usage,
    new_id,
)
from penstock.server.openai.requests.chat import ChatRequest
from penstock.server.openai.requests.schema import parse
from penstock.server.respond import respond
from penstock.server.sse import EventStream, TextEvents, event
from penstock.server.state import ServerState, state_of
from penstock.text.tools.calls import joined
from penstock.types.outputs import TextDelta, TokenLogprob, ToolCallDelta
from penstock.types.request import FinishReason, GenerateInput


async def chat_completions(request: Request) -> Response | EventStream:
    state = state_of(request)
    defaults = state.pipeline.client.info.default_sampling
    asked, given = await read_body(request, partial(_read, defaults))
    inputs = on_behalf(tenant_of(request), [given])
    state, inputs = await with_adapter(state, inputs, asked.model, asked.lora_request)
    generations = await Generations.start(
        state.pipeline, inputs, state.metrics.observe, stream=asked.stream
    )
    responder = ChatResponder(asked, state, generations)
    return await respond(request, generations, responder, EventStream if asked.stream else None)


def _read(defaults: Mapping[str, Any], body: Any) -> tuple[ChatRequest, GenerateInput]:
    asked = parse(ChatRequest, body)
    return asked, asked.chat_input(defaults)


class ChatResponder:
    """Writes one request's response: one id, model and time over all its chunks."""

    def __init__(self, asked: ChatRequest, state: ServerState, generations: Generations) -> None:
        self._asked = asked
        self._names = state.names.as_ids() if asked.return_tokens_as_token_ids else state.names
        self._generations = generations
        self.id = new_id("chatcmpl") if asked.request_id is None else f"chatcmpl-{asked.request_id}"
        self._created = int(time.time())
        self._model = state.model_name  # what runs, whatever name was asked for
        self._echo = _echo(asked)
        has_text = asked.detokenize and state.pipeline.tokenizer is not None
        self._shows_ids = asked.return_token_ids or not has_text
        # Between its first and its last, an event mostly brings text and nothing else.
        self._is_plain = not (asked.streams_usage_always or asked.logprobs or self._shows_ids)
        self._text_events: dict[int, TextEvents] = {}  # by sample, once it has begun
        self._reasoning_events: dict[int, TextEvents] = {}
        self._begun: set[int] = set()
        self._callers: set[int] = set()  # samples that have called a tool
        self._max_calls = 1 if asked.parallel_tool_calls is False else None
        self._prompt_entries: list[TokenLogprob] = []

    async def reply(self) -> bytes:
        [samples] = await self._generations.collect()
        return await encoded_reply([samples], lambda: self._encoded(samples))

    def _encoded(self, samples: Sequence[TextDelta]) -> bytes:
        reply = ChatResponse(
            id=self.id,
            created=self._created,
            model=self._model,
            choices=[encoded(self._choice(sample)) for sample in samples],
            usage=Usage.of(self._generations.usage()),
            prompt_token_ids=self._prompt_ids() or None,
            prompt_logprobs=self._prompt_logprobs(list(samples[0].prompt_logprobs)),
        )
        return msgspec.json.encode(reply)

    def _prompt_ids(self) -> list[int]:
        [generation] = self._generations.running
        return list(map(int, generation.prompt_ids)) if self._asked.return_token_ids else []

    def _choice(self, sample: TextDelta) -> ChatChoice:
        calls = [
            ToolCall(id=call.id, function=Function(name=call.name, arguments=call.arguments))
            for call in joined(sample.tool_calls)[: self._max_calls]
        ]
        text = self._echo + sample.text
        reasoning = sample.reasoning if self._asked.include_reasoning else ""
        return ChatChoice(
            index=sample.index,
            message=ChatMessage(
                content=None if calls and not text else text,
                reasoning_content=reasoning or None,
                tool_calls=calls,
            ),
            logprobs=chat_logprobs(sample.logprobs, self._names) if self._asked.logprobs else None,
            finish_reason=_finish_reason(sample, bool(calls)),
            stop_reason=sample.stop_reason,
            avg_decoded_tokens_per_iter=sample.tokens_per_step,
            token_ids=list(sample.token_ids) if self._shows_ids else UNSET,
        )

    def event(self, prompt_index: int, delta: TextDelta) -> bytes:
        index = delta.index
        if not self._asked.include_reasoning and delta.reasoning:
            delta = replace(delta, reasoning="")
        if delta.finish is None and not delta.tool_calls and index in self._text_events:
            data = b""
            if delta.reasoning:
                data = self._reasoning_events[index].event(delta.reasoning)
            return data + self._text_events[index].event(delta.text) if delta.text else data
        if index == 0:
            self._prompt_entries += delta.prompt_logprobs
        data = b""
        if index not in self._begun and (delta.token_ids or delta.finish is not None):
            # The role goes out with the first token, so that a client sees when that was.
            data = self._opening(index)
        calls = self._call_chunks(delta)
        if calls and (delta.reasoning or delta.text):
            # Text comes before calls, and a call's name before its arguments: an event each.
            said = _chat_delta(delta)
            data += self._event([ChatChunkChoice(index=index, delta=said)])
            delta = replace(delta, text="", reasoning="")
        for call in calls[:-1]:
            data += self._event([ChatChunkChoice(index=index, delta=ChatDelta(tool_calls=[call]))])
        is_said = bool(delta.text or delta.reasoning or calls)
        if is_said or delta.finish is not None or self._carries_tokens(delta):
            data += self._event([self._chunk_choice(delta, calls[-1:])])
        return data

    def _call_chunks(self, delta: TextDelta) -> list[ToolCallChunk]:
        chunks: list[ToolCallChunk] = []
        for call in delta.tool_calls:
            if self._max_calls is None or call.index < self._max_calls:
                self._callers.add(delta.index)
                chunks += _chunks_of(call)
        return chunks

    def _opening(self, index: int) -> bytes:
        self._begun.add(index)
        if self._is_plain:
            self._text_events[index] = self._events_of(index, lambda text: ChatDelta(content=text))
            self._reasoning_events[index] = self._events_of(
                index, lambda text: ChatDelta(reasoning_content=text)
            )
        opening = ChatDelta(role="assistant", content=self._echo)
        return self._event(
            [ChatChunkChoice(index=index, delta=opening)],
            prompt_logprobs=UNSET if index else self._prompt_logprobs(self._prompt_entries),
            prompt_ids=UNSET if index else self._prompt_ids() or UNSET,
        )

    def _events_of(self, index: int, delta_of: Callable[[str], ChatDelta]) -> TextEvents:
        return TextEvents(
            lambda text: self._chunk([ChatChunkChoice(index=index, delta=delta_of(text))])
        )

    def last_event(self) -> bytes:
        if not self._asked.streams_usage:
            return b""
        return self._event([], usage=Usage.of(self._generations.usage()))

    def _carries_tokens(self, delta: TextDelta) -> bool:
        return bool(delta.token_ids) and (self._asked.logprobs or self._shows_ids)

    def _chunk_choice(self, delta: TextDelta, calls: list[ToolCallChunk]) -> ChatChunkChoice:
        choice = ChatChunkChoice(index=delta.index, delta=_chat_delta(delta))
        if calls:
            choice.delta.tool_calls = calls
        if self._asked.logprobs and delta.logprobs:
            choice.logprobs = chat_logprobs(delta.logprobs, self._names)
        if self._shows_ids:
            choice.token_ids = list(delta.token_ids)
        if delta.finish is not None:
            choice.finish_reason = _finish_reason(delta, delta.index in self._callers)
            choice.avg_decoded_tokens_per_iter = delta.tokens_per_step
            if delta.stop_reason is not None:
                choice.stop_reason = delta.stop_reason
        return choice

    def _event(
        self,
        choices: list[ChatChunkChoice],
        usage: Usage | UnsetType = UNSET,
        prompt_logprobs: list[Any] | UnsetType = UNSET,
        prompt_ids: list[int] | UnsetType = UNSET,
    ) -> bytes:
        if usage is UNSET and self._asked.streams_usage_always:
            usage = Usage.of(self._generations.usage())
        return event(self._chunk(choices, usage, prompt_logprobs, prompt_ids))

    def _chunk(
        self,
        choices: list[ChatChunkChoice],
        usage: Usage | UnsetType = UNSET,
        prompt_logprobs: list[Any] | UnsetType = UNSET,
        prompt_ids: list[int] | UnsetType = UNSET,
    ) -> ChatChunk:
        return ChatChunk(
            id=self.id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=usage,
            prompt_logprobs=prompt_logprobs,
            prompt_token_ids=prompt_ids,
        )

    def _prompt_logprobs(self, entries: list[TokenLogprob]) -> list[Any] | UnsetType:
        if self._asked.prompt_logprobs is None:
            return UNSET
        return prompt_logprobs(entries, self._names)


def _chat_delta(delta: TextDelta) -> ChatDelta:
    return ChatDelta(content=delta.text or UNSET, reasoning_content=delta.reasoning or UNSET)


def _chunks_of(call: ToolCallDelta) -> list[ToolCallChunk]:
    chunks = []
    if call.name:
        opening = FunctionDelta(name=call.name, arguments="")
        chunks.append(
            ToolCallChunk(index=call.index, id=call.id, type="function", function=opening)
        )
    if call.arguments:
        chunks.append(
            ToolCallChunk(index=call.index, function=FunctionDelta(arguments=call.arguments))
        )
    return chunks


def _finish_reason(delta: TextDelta, has_called: bool) -> str:
    assert delta.finish is not None
    if has_called and delta.finish is FinishReason.STOP:
        return "tool_calls"
    return delta.finish.value


def _echo(asked: ChatRequest) -> str:
    """With `echo` the completion begins with the words of the assistant that it continues."""
    last = asked.messages[-1]
    if not asked.echo or last["role"] != "assistant":
        return ""
    content = last.get("content") or ""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)
