"""Server-sent events: chunk -> bytes, and the response that sends them until the client leaves."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from penstock import log
from penstock.server.errors import explain

_log = log.get(__name__)
_ENCODER = msgspec.json.Encoder()
DONE = b"data: [DONE]\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy must pass each event on at once
]
T = TypeVar("T")


class ClientGone(Exception):
    """The client closed the connection before it had its answer."""


def event(chunk: Any) -> bytes:
    return b"data: " + _ENCODER.encode(chunk) + b"\n\n"


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
    """An ASGI response that sends `events`, then `[DONE]`. `close` runs however it ends.

    An error after the first byte cannot change the status any more: it becomes an event.
    """

    def __init__(
        self, events: AsyncGenerator[bytes, None], close: Callable[[], Awaitable[None]]
    ) -> None:
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._send_all(send))
        except ClientGone:
            pass
        finally:
            await self._close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        try:
            async with aclosing(self._events) as events:
                async for data in events:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            last = DONE
        except Exception as error:
            said = explain(error)
            if said.status == 500:
                _log.exception("a stream failed")
            last = event(said.body()) + DONE
        await send({"type": "http.response.body", "body": last})
