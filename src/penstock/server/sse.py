"""Server-sent events: chunk -> bytes, and the response that sends them until the client leaves."""

import asyncio
import functools
import uuid
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from penstock import log
from penstock.server.errors import ErrorBody, explain
from penstock.server.generations import Generations
from penstock.server.large_reply import is_large
from penstock.server.pipe import Pipe, pipe_of
from penstock.types.outputs import TextDelta

_log = log.get(__name__)
_encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy must pass each event on at once
]
# Stands for the text while an envelope is made; drawn anew so that nobody can send it to us.
_TEXT = uuid.uuid4().hex
T = TypeVar("T")


class ClientGone(Exception):
    """The client closed the connection before it had its response."""


def event(chunk: Any) -> bytes:
    return b"data: " + _encode(chunk) + b"\n\n"


def named_event(chunk: msgspec.Struct) -> bytes:
    """Named as its `type` says, its tag."""
    return _name_line(type(chunk)) + event(chunk)


@functools.cache
def _name_line(kind: type[msgspec.Struct]) -> bytes:
    return f"event: {kind.__struct_config__.tag}\n".encode()


class TextEvents:
    """Events that differ in one text only: the rest of the JSON is made once."""

    def __init__(self, make_chunk: Callable[[str], Any]) -> None:
        self._head, _, self._tail = event(make_chunk(_TEXT)).partition(_encode(_TEXT))

    def event(self, text: str) -> bytes:
        return self._head + _encode(text) + self._tail


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, or `ClientGone` (and `work` cancelled) as soon as the client leaves.

    `work` runs in the task of the caller, which is cancelled to end it, as `asyncio.timeout` does:
    a task of its own and waiting for the first of two take 20 us more (2026-11-16).
    """
    task = asyncio.current_task()
    assert task is not None
    num_cancelled = task.cancelling()
    is_over = is_gone = False

    def on_left(watcher: "asyncio.Task[None]") -> None:
        nonlocal is_gone
        if watcher.cancelled():
            return
        watcher.exception()  # however `receive` has ended, nothing comes from the client any more
        if not is_over:
            is_gone = True
            task.cancel()

    watcher = asyncio.ensure_future(_disconnect(receive))
    watcher.add_done_callback(on_left)
    try:
        return await work
    except asyncio.CancelledError:
        if is_gone and task.uncancel() <= num_cancelled:
            raise ClientGone from None
        raise
    finally:
        is_over = True
        watcher.cancel()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventWriter(Protocol):
    def event(self, prompt_index: int, delta: TextDelta) -> bytes:
        """Empty while there is nothing to say."""


class Responder(EventWriter, Protocol):
    """Writes the events of one response of the completions and chat APIs."""

    def last_event(self) -> bytes: ...


class FramedResponder(EventWriter, Protocol):
    """Writes the events of one response, how it begins and how it ends among them."""

    def opening(self) -> bytes:
        """Before any token."""

    async def ending(self, error: Exception | None) -> bytes: ...


class EventStream:
    """An ASGI response: an event for every delta, then the last one, then `[DONE]`.

    An error after the first byte cannot change the status any more: it becomes an event. While the
    client reads too slowly its tokens are gathered and then sent as one event; however it ends, the
    generations are closed. From its first large delta on, the events are made in a thread.
    """

    def __init__(self, generations: Generations, responder: Responder) -> None:
        self._last_event = responder.last_event
        self._begin(generations, responder)

    def _begin(self, generations: Generations, writer: EventWriter) -> None:
        self._generations = generations
        self._writer = writer
        self._pipe: Pipe  # from the call on
        self._is_large = False
        self._later: deque[tuple[int, TextDelta]] = deque()
        self._writing: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        generations = self._generations
        self._pipe = pipe = pipe_of(scope, send)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            if opening := self._opening():
                pipe.write(opening)
            pipe.on_pause, pipe.on_resume = generations.hold, generations.release
            if pipe.is_paused:
                generations.hold()
            error = await until_disconnect(receive, self._write_all())
            await pipe.flush()
            await send({"type": "http.response.body", "body": await self._ending(error)})
        except ClientGone:
            pass
        finally:
            if self._writing is not None:
                self._writing.cancel()
            pipe.close()
            await generations.aclose()

    async def _write_all(self) -> Exception | None:
        error = await self._generations.stream_to(self.write_event)
        try:
            if self._writing is not None:
                await self._writing
        except Exception as bug:
            return bug
        return error

    def write_event(self, prompt_index: int, delta: TextDelta) -> None:
        self._is_large = self._is_large or is_large(delta)
        if self._is_large:
            self._later.append((prompt_index, delta))
            if self._writing is None:
                self._writing = asyncio.create_task(self._write_later())
        elif data := self._writer.event(prompt_index, delta):
            self._pipe.write(data)

    async def _write_later(self) -> None:
        while self._later:
            if data := await asyncio.to_thread(self._writer.event, *self._later.popleft()):
                self._pipe.write(data)
        self._writing = None

    def _opening(self) -> bytes:
        return b""

    async def _ending(self, error: Exception | None) -> bytes:
        if error is None:
            return self._last_event() + DONE
        return event(explain_failure(error).as_dict()) + DONE


class FramedStream(EventStream):
    """Of APIs that begin and end a stream with events of their own."""

    def __init__(self, generations: Generations, responder: FramedResponder) -> None:
        self._begin(generations, responder)
        self._responder = responder

    def _opening(self) -> bytes:
        return self._responder.opening()

    async def _ending(self, error: Exception | None) -> bytes:
        return await self._responder.ending(error)


def explain_failure(error: Exception) -> ErrorBody:
    """Of a response that has begun; a bug is logged."""
    said = explain(error)
    if said.status == 500:
        _log.error("a response failed", exc_info=error)
    return said
