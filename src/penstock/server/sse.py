"""Server-sent events: chunk -> bytes, and the response that sends them until the client leaves."""

import asyncio
import uuid
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from penstock import log
from penstock.server.errors import explain
from penstock.server.generations import Generations
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


class Responder(Protocol):
    """Writes the events of one response."""

    def event(self, prompt_index: int, delta: TextDelta) -> bytes:
        """Empty while there is nothing to say."""

    def last_event(self) -> bytes: ...


class EventStream:
    """An ASGI response: an event for every delta, then the last one, then `[DONE]`.

    An error after the first byte cannot change the status any more: it becomes an event. While the
    client reads too slowly its tokens are gathered and then sent as one event; however it ends, the
    generations are closed.
    """

    def __init__(self, generations: Generations, responder: Responder) -> None:
        self._generations = generations
        self._responder = responder
        self._pipe: Pipe  # from the call on

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        generations = self._generations
        self._pipe = pipe = pipe_of(scope, send)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            pipe.on_pause, pipe.on_resume = generations.hold, generations.release
            if pipe.is_paused:
                generations.hold()
            error = await until_disconnect(receive, generations.stream_to(self.write_event))
            await pipe.flush()
            await send({"type": "http.response.body", "body": self._end(error)})
        except ClientGone:
            pass
        finally:
            pipe.close()
            await generations.aclose()

    def write_event(self, prompt_index: int, delta: TextDelta) -> None:
        if data := self._responder.event(prompt_index, delta):
            self._pipe.write(data)

    def _end(self, error: Exception | None) -> bytes:
        if error is None:
            return self._responder.last_event() + DONE
        said = explain(error)
        if said.status == 500:
            _log.error("a stream failed", exc_info=error)
        return event(said.as_dict()) + DONE
