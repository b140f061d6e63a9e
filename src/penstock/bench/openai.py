"""Requests and responses of an OpenAI-compatible server, as a benchmark sends and reads them.

A chunk of a stream is decoded into the few fields that count, and its arrival is noted. Which
server it is makes no difference.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from penstock.bench.http import HttpClient, HttpError
from penstock.bench.records import Ask, Response
from penstock.errors import ConfigError

Backend = Literal["openai", "openai-chat"]

PATHS: dict[str, str] = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
_OK = 200
_MAX_ERROR_BYTES = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyOptions:
    """What all requests of a benchmark share. `sampling`: fields that are sent as they are."""

    backend: Backend
    model: str
    stream: bool = True
    ignore_eos: bool = False
    logprobs: int | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)


async def served_model(client: HttpClient) -> str:
    """The name of the first model that the server has."""
    status, body = await client.fetch(client.get_request("/v1/models"))
    try:
        return str(msgspec.json.decode(body)["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise ConfigError(f"/v1/models names no model (status {status}); set --model") from None


def bearer(api_key: str | None) -> dict[str, str]:
    """The header that shows the key."""
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def body_of(ask: Ask, options: BodyOptions) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": ask.model or options.model,
        "temperature": 0.0,
        "repetition_penalty": 1.0,
        "stream": options.stream,
    }
    if options.stream:
        body["stream_options"] = {"include_usage": True}
    if options.ignore_eos:
        body["ignore_eos"] = True
    if options.backend == "openai":
        body |= {"prompt": ask.prompt, "max_tokens": ask.max_tokens}
        if options.logprobs is not None:
            body["logprobs"] = options.logprobs
    else:
        message = {"role": "user", "content": _content(ask)}
        body |= {"messages": [message], "max_completion_tokens": ask.max_tokens}
        if options.logprobs is not None:
            body |= {"logprobs": True, "top_logprobs": options.logprobs}
    return {**body, **options.sampling}


def _content(ask: Ask) -> str | list[dict[str, Any]]:
    if not isinstance(ask.prompt, str):
        raise ConfigError("a chat has no room for token ids; leave out --tokenize-on-client")
    if not ask.image_urls:
        return ask.prompt
    images = [{"type": "image_url", "image_url": {"url": url}} for url in ask.image_urls]
    return [{"type": "text", "text": ask.prompt}, *images]


class _Part(msgspec.Struct, gc=False):
    """A delta of a streamed chat, or the message of a whole one."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[msgspec.Raw] | None = None

    @property
    def text(self) -> str:
        return (self.reasoning_content or self.reasoning or "") + (self.content or "")


class _Choice(msgspec.Struct, gc=False):
    text: str | None = None
    delta: _Part | None = None
    message: _Part | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    avg_decoded_tokens_per_iter: float | None = None


class _PromptDetails(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, gc=False):
    completion_tokens: int | None = None
    prompt_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(msgspec.Struct, gc=False):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw()


_decode_chunk: Callable[[bytes], _Chunk] = msgspec.json.Decoder(_Chunk).decode


class AnswerReader:
    """Reads one response, streamed or whole. `response` is complete after `end`.

    A chunk with choices counts, except one of a chat that says nothing but who speaks.
    """

    def __init__(self, is_stream: bool, on_chunk: Callable[[], None] = lambda: None) -> None:
        self.response = Response(started_at=time.perf_counter())
        self._is_stream = is_stream
        self._on_chunk = on_chunk
        self._rest = b""  # of a line; where it is no stream, all of the body
        self._pieces: list[str] = []
        self._is_done = False

    def begin(self, status: int) -> None:
        self.response.status = status
        self._is_stream &= status == _OK

    def take(self, body: bytes) -> None:
        if not self._is_stream:
            self._rest += body
            return
        now = time.perf_counter()
        *lines, self._rest = (self._rest + body).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._take_event(line[5:], now)

    def end(self) -> None:
        """The body has ended."""
        if (status := self.response.status) != _OK:
            raise HttpError(f"status {status}: {_shown(self._rest)}")
        if not self._is_stream:
            self._take_chunk(self._decoded(self._rest), time.perf_counter())
        elif not self._is_done:
            raise HttpError("the stream ended before its [DONE]")
        if self.response.num_chunks == 0:
            raise HttpError("the stream was empty")
        self.response.text = "".join(self._pieces)

    def _take_event(self, payload: bytes, now: float) -> None:
        if payload.strip() == b"[DONE]":
            self._is_done = True
        else:
            self._take_chunk(self._decoded(payload), now)

    def _decoded(self, payload: bytes) -> _Chunk:
        try:
            chunk = _decode_chunk(payload)
        except msgspec.DecodeError as error:
            raise HttpError(f"not a response ({error}): {_shown(payload)}") from None
        if (said := bytes(chunk.error)) not in (b"", b"null"):
            raise HttpError(f"the response is an error: {_shown(said)}")
        return chunk

    def _take_chunk(self, chunk: _Chunk, now: float) -> None:
        response = self.response
        if chunk.choices:
            choice = chunk.choices[0]
            if (part := choice.delta or choice.message) is None:
                text, counts = choice.text or "", True
            else:
                text = part.text
                counts = bool(text or choice.finish_reason or part.tool_calls)
            if text:
                self._pieces.append(text)
            if choice.token_ids:
                response.token_ids += choice.token_ids
            if counts:
                response.note(now)
                self._on_chunk()
            if choice.avg_decoded_tokens_per_iter is not None:
                response.tokens_per_step = choice.avg_decoded_tokens_per_iter
        if chunk.usage is not None:
            response.num_output = chunk.usage.completion_tokens
            response.num_prompt = chunk.usage.prompt_tokens
            if (details := chunk.usage.prompt_tokens_details) is not None:
                response.num_cached = details.cached_tokens


def _shown(said: bytes) -> str:
    return said[:_MAX_ERROR_BYTES].decode(errors="replace")
