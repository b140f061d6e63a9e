"""Server-sent events: chunk -> bytes, and the response that sends them until the client leaves."""

import asyncio
import uuid
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from penstock import log
from penstock.server.errors import explain
from penstock.server.generations import Generations
from penstock.server.http import Pipe, pipe_of
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
    """The client closed the connection before it had its answer."""


def event(chunk: Any) -> bytes:
    return b"data: " + _encode(chunk) + b"\n\n"


class TextEvents:
    """Events that differ in one text only: the rest of the JSON is made once."""

    def __init__(self, make_chunk: Callable[[str], Any]) -> None:
        self._head, _, self._tail = event(make_chunk(_TEXT)).partition(_encode(_TEXT))

    def event(self, text: str) -> bytes:
        return self._head + _encode(text) + self._tail


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, or `ClientGone` (and `work` cancelled) as soon as the client leaves."""
    worker, watcher = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((worker, watcher), return_when=asyncio.FIRST_COMPLETED)
        if worker.done():
            return worker.result()
        raise ClientGone
    finally:
        worker.cancel()
        watcher.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream:
    """An ASGI response: `write` of every delta, then `last`, then `[DONE]`.

    An error after the first byte cannot change the status any more: it becomes an event. While the
    client reads too slowly its tokens are gathered and then sent as one event; however it ends, the
    generations are closed.
    """

    def __init__(
        self,
        generations: Generations,
        write: Callable[[int, TextDelta], bytes],
        last: Callable[[], bytes],
    ) -> None:
        self._generations = generations
        self._write = write
        self._last = last

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pipe = pipe_of(scope)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            error = await until_disconnect(receive, self._send_all(pipe))
            await send({"type": "http.response.body", "body": self._end(error)})
        except ClientGone:
            pass
        finally:
            pipe.close()
            await self._generations.aclose()

    async def _send_all(self, pipe: Pipe) -> Exception | None:
        ended: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()

        def take(prompt: int, delta: TextDelta) -> None:
            if data := self._write(prompt, delta):
                pipe.write(data)

        pipe.on_pause, pipe.on_resume = self._generations.hold, self._generations.release
        if pipe.is_paused:
            self._generations.hold()
        self._generations.push_to(
            take, lambda error: None if ended.done() else ended.set_result(error)
        )
        return await ended

    def _end(self, error: Exception | None) -> bytes:
        if error is None:
            return self._last() + DONE
        said = explain(error)
        if said.status == 500:
            _log.error("a stream failed", exc_info=error)
        return event(said.body()) + DONE
