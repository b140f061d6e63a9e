"""`POST /v1/completions`: one or many prompts in, text out, whole or as a stream."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.errors import RequestError
from penstock.frontend.generation import Generation
from penstock.server.adapters import with_adapter
from penstock.server.auth import on_behalf, tenant_of
from penstock.server.body import read_body
from penstock.server.generations import Generations
from penstock.server.large_reply import encoded, encoded_reply
from penstock.server.openai.logprobs import CompletionWriter, prompt_logprobs
from penstock.server.openai.reply import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionResponse,
    Usage,
    new_id,
)
from penstock.server.openai.requests.completions import CompletionRequest
from penstock.server.openai.requests.schema import parse
from penstock.server.respond import respond
from penstock.server.sse import EventStream, TextEvents, event
from penstock.server.state import ServerState, state_of
from penstock.types.outputs import TextDelta, TokenLogprob
from penstock.types.request import FinishReason, GenerateInput


async def completions(request: Request) -> Response | EventStream:
    state = state_of(request)
    defaults = state.pipeline.client.info.default_sampling
    asked, inputs = await read_body(request, partial(_read, defaults))
    if asked.echo and state.pipeline.tokenizer is None:
        raise RequestError("unsupported", "echo needs a tokenizer, the server runs without", "echo")
    inputs = on_behalf(tenant_of(request), inputs)
    state, inputs = await with_adapter(state, inputs, asked.model, asked.lora_request)
    generations = await Generations.start(
        state.pipeline, inputs, state.metrics.observe, stream=asked.stream
    )
    responder = CompletionResponder(asked, state, generations)
    return await respond(request, generations, responder, EventStream if asked.stream else None)


def _read(defaults: Mapping[str, Any], body: Any) -> tuple[CompletionRequest, list[GenerateInput]]:
    asked = parse(CompletionRequest, body)
    return asked, asked.inputs(defaults)


class CompletionResponder:
    """Writes one request's response: one id, model and time over all its chunks."""

    def __init__(
        self, asked: CompletionRequest, state: ServerState, generations: Generations
    ) -> None:
        self._asked = asked
        self._generations = generations
        self.id = new_id("cmpl") if asked.request_id is None else f"cmpl-{asked.request_id}"
        self._created = int(time.time())
        self._model = state.model_name  # what runs, whatever name was asked for
        # Between its first and its last, an event brings text and nothing else.
        self._is_plain = not (
            asked.streams_usage_always
            or asked.echo_only
            or asked.logprobs is not None
            or _shows_ids(asked, state)
        )
        self._text_events: dict[int, TextEvents] = {}  # by choice, once it has begun
        self._choices = [
            _prompt_choices(asked, state, one, first_index=prompt_index * asked.n)
            for prompt_index, one in enumerate(generations.running)
        ]

    async def reply(self) -> bytes:
        collected = await self._generations.collect()
        return await encoded_reply(collected, lambda: self._encoded(collected))

    def _encoded(self, collected: Sequence[Sequence[TextDelta]]) -> bytes:
        written = []
        for prompt_index, samples in enumerate(collected):
            for sample in samples:
                choice = self._choices[prompt_index][sample.index].write(sample)
                assert choice is not None, "a finished sample is always written"
                written.append(encoded(choice))
        return msgspec.json.encode(self._reply(written, self._usage()))

    def event(self, prompt_index: int, delta: TextDelta) -> bytes:
        index = prompt_index * self._asked.n + delta.index
        if delta.finish is None and (plain := self._text_events.get(index)) is not None:
            return plain.event(delta.text) if delta.text else b""
        choice = self._choices[prompt_index][delta.index].write(delta)
        if choice is None:
            return b""
        if self._is_plain and delta.finish is None:
            self._text_events[index] = TextEvents(
                lambda text: self._reply([CompletionChoice(index=index, text=text)], None)
            )
        always = self._asked.streams_usage_always
        return event(self._reply([choice], self._usage() if always else None))

    def last_event(self) -> bytes:
        if not self._asked.streams_usage:
            return b""
        return event(self._reply([], self._usage()))

    def _reply(self, choices: list[CompletionChoice], usage: Usage | None) -> CompletionResponse:
        return CompletionResponse(
            id=self.id, created=self._created, model=self._model, choices=choices, usage=usage
        )

    def _usage(self) -> Usage:
        counts = self._generations.usage()
        return Usage.of(replace(counts, completion_tokens=0) if self._asked.echo_only else counts)


def _shows_ids(asked: CompletionRequest, state: ServerState) -> bool:
    return asked.return_token_ids or not asked.detokenize or state.pipeline.tokenizer is None


def _prompt_choices(
    asked: CompletionRequest, state: ServerState, generation: Generation, first_index: int
) -> list["_Choice"]:
    prompt_entries: list[TokenLogprob] = []
    return [
        _Choice(asked, state, generation, first_index + sample, prompt_entries)
        for sample in range(generation.num_samples)
    ]


class _Choice:
    """Writes one sample, all at once or delta by delta; the echo of its prompt comes first.

    `prompt_entries` is shared by the samples of a prompt: the first one brings them.
    """

    def __init__(
        self,
        asked: CompletionRequest,
        state: ServerState,
        generation: Generation,
        index: int,
        prompt_entries: list[TokenLogprob],
    ) -> None:
        self._asked = asked
        self._state = state
        self._generation = generation
        self._index = index
        self._prompt_entries = prompt_entries
        names = state.names.as_ids() if asked.return_tokens_as_token_ids else state.names
        self._writer = CompletionWriter(
            names, asked.logprobs or 0, len(asked.logprob_token_ids or ())
        )
        self._shows_ids = _shows_ids(asked, state)
        self._begun = False

    def write(self, delta: TextDelta) -> CompletionChoice | None:
        """None while there is nothing to say."""
        asked = self._asked
        if delta.index == 0:
            self._prompt_entries += delta.prompt_logprobs
        if not self._begun and not delta.token_ids and delta.finish is None:
            return None  # the prompt is still being read
        choice = CompletionChoice(index=self._index, text="")
        if asked.logprobs is not None:
            choice.logprobs = CompletionLogprobs([], [], [], [])
        if not self._begun:
            self._begun = True
            self._write_prompt(choice)
        if not asked.echo_only:
            choice.text += delta.text
            choice.stop_reason = delta.stop_reason
            if choice.logprobs is not None:
                self._writer.write(choice.logprobs, delta.logprobs)
                if delta.stop_logprob is not None:  # every token made has its entry, as with peers
                    self._writer.write(choice.logprobs, (delta.stop_logprob,))
            if self._shows_ids:
                choice.token_ids = list(delta.token_ids)
        if delta.finish is not None:
            finish = FinishReason.LENGTH if asked.echo_only else delta.finish
            choice.finish_reason = finish.value
            choice.avg_decoded_tokens_per_iter = delta.tokens_per_step
        is_news = choice.text or choice.token_ids or choice.finish_reason or choice.logprobs
        return choice if is_news else None

    def _write_prompt(self, choice: CompletionChoice) -> None:
        asked, generation = self._asked, self._generation
        if asked.return_token_ids:
            choice.prompt_token_ids = list(map(int, generation.prompt_ids))
        if asked.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs(self._prompt_entries, self._state.names)
        if not asked.echo:
            return
        tokenizer = self._state.pipeline.tokenizer
        assert tokenizer is not None
        prompt_ids = list(map(int, generation.prompt_ids))
        choice.text = (
            tokenizer.decode(prompt_ids, skip_special_tokens=False)
            if generation.prompt_text is None
            else generation.prompt_text
        )
        if choice.logprobs is not None:
            self._writer.write_prompt(choice.logprobs, prompt_ids, self._prompt_entries)
