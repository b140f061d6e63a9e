"""`ResponsesResponder`: writes one response, whole or as events, and stores it at its end."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from penstock.server.errors import ErrorBody
from penstock.server.generations import Generations
from penstock.server.openai.logprobs import chat_logprobs
from penstock.server.openai.reply import ChatTokenLogprob
from penstock.server.openai.requests.responses import ResponsesRequest
from penstock.server.openai.responses.output_writer import OutputWriter
from penstock.server.openai.responses.records import (
    IncompleteDetails,
    ReasoningEcho,
    ResponseCompleted,
    ResponseCreated,
    ResponseError,
    ResponseFailed,
    ResponseIncomplete,
    ResponseInProgress,
    ResponseObject,
    ResponseUsage,
    StoredResponse,
    TextEcho,
    new_id,
)
from penstock.server.openai.responses.store import TenantResponses
from penstock.server.sse import explain_failure, named_event
from penstock.server.state import ServerState
from penstock.text.tokenizer import Tokenizer
from penstock.types.outputs import TextDelta
from penstock.types.request import FinishReason
from penstock.types.sampling import SamplingParams

_INLINE_CHARS = 4096  # below this, tokenizing costs less than handing it to a thread


class ResponsesResponder:
    """`input_items`: the conversation it is made from. `stored`: where it goes, or None."""

    def __init__(
        self,
        asked: ResponsesRequest,
        state: ServerState,
        generations: Generations,
        sampling: SamplingParams,
        input_items: list[dict[str, Any]],
        stored: TenantResponses | None,
    ) -> None:
        self._has_logprobs = asked.has_logprobs
        self._names = state.names
        self._tokenizer = state.pipeline.tokenizer
        self.generations = generations
        self._input_items = input_items
        self.stored = stored
        self._writer = OutputWriter(max_calls=1 if asked.parallel_tool_calls is False else None)
        self._finish: FinishReason | None = None
        self.begun = _begun(asked, state.model_name, sampling, is_stored=stored is not None)

    @property
    def id(self) -> str:
        return self.begun.id

    async def collected(self) -> ResponseObject:
        """The response, whole; stored by nobody."""
        [[sample]] = await self.generations.collect()
        self._push(sample)
        return await self._ended()

    async def reply(self) -> bytes:
        return msgspec.json.encode(await self._store(await self.collected()))

    def opening(self) -> bytes:
        created = ResponseCreated(sequence_number=self._writer.next_number(), response=self.begun)
        number = self._writer.next_number()
        begun = ResponseInProgress(sequence_number=number, response=self.begun)
        return named_event(created) + named_event(begun)

    def event(self, prompt_index: int, delta: TextDelta) -> bytes:
        return b"".join(map(named_event, self._push(delta)))

    async def ending(self, error: Exception | None) -> bytes:
        if error is not None:
            response = self.failed(explain_failure(error))
        else:
            response = await self._ended()
        await self._store(response)
        kind = _LAST_EVENTS[response.status]
        return named_event(kind(sequence_number=self._writer.next_number(), response=response))

    def record(self, response: ResponseObject) -> StoredResponse:
        return StoredResponse(response=response, input=self._input_items)

    async def _store(self, response: ResponseObject) -> ResponseObject:
        if self.stored is not None:
            response.store = await asyncio.to_thread(self.stored.save, self.record(response))
        return response

    async def _ended(self) -> ResponseObject:
        is_cut = self._finish is FinishReason.LENGTH
        return replace(
            self.begun,
            status="incomplete" if is_cut else "completed",
            completed_at=None if is_cut else int(time.time()),
            incomplete_details=IncompleteDetails(reason="max_output_tokens") if is_cut else None,
            output=self._writer.items,
            usage=ResponseUsage.of(
                self.generations.usage(),
                await _num_tokens(self._tokenizer, self._writer.reasoning),
            ),
        )

    def failed(self, said: ErrorBody) -> ResponseObject:
        """With the items that were done."""
        error = ResponseError(code="server_error", message=said.message)
        return replace(self.begun, status="failed", error=error, output=self._writer.items)

    def _push(self, delta: TextDelta) -> list[Any]:
        self._finish = delta.finish
        logprobs: Sequence[ChatTokenLogprob] = ()
        if self._has_logprobs and delta.logprobs:
            logprobs = chat_logprobs(delta.logprobs, self._names).content
        return self._writer.push(delta, logprobs)


_LAST_EVENTS = {
    "completed": ResponseCompleted,
    "incomplete": ResponseIncomplete,
    "failed": ResponseFailed,
}


def _begun(
    asked: ResponsesRequest, model: str, sampling: SamplingParams, is_stored: bool
) -> ResponseObject:
    text, reasoning = asked.text, asked.reasoning
    return ResponseObject(
        id=new_id("resp"),
        created_at=int(time.time()),
        status="in_progress",
        background=asked.background,
        instructions=asked.instructions,
        max_output_tokens=asked.max_output_tokens,
        max_tool_calls=asked.max_tool_calls,
        model=model,
        parallel_tool_calls=asked.parallel_tool_calls is not False,
        previous_response_id=asked.previous_response_id,
        reasoning=ReasoningEcho(effort=None if reasoning is None else reasoning.effort),
        service_tier=asked.service_tier,
        store=is_stored,
        temperature=sampling.temperature,
        text=TextEcho(
            format=(text and text.format) or {"type": "text"},
            verbosity=None if text is None else text.verbosity,
        ),
        tool_choice=asked.tool_choice or "auto",
        tools=asked.tools or [],
        top_logprobs=asked.top_logprobs or 0,
        top_p=sampling.top_p,
        truncation=asked.truncation,
        user=asked.user,
        metadata=asked.metadata or {},
    )


async def _num_tokens(tokenizer: Tokenizer | None, text: str) -> int:
    """Of reasoning as it is told, without its tags."""
    if tokenizer is None or not text:
        return 0
    if len(text) <= _INLINE_CHARS:
        return len(tokenizer.encode(text, add_special_tokens=False))
    return len(await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=False))
