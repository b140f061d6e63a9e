"""`Pipe`: the body of a streamed response, by the short way past ASGI to the socket.

The end of the chain that `generations` lists: a piece is written in the very call that brings it;
through ASGI each would cost a task switch and a message. Under a server that offers no short way
(`QueuedPipe`) the pieces take the long one.
"""

import asyncio
from collections.abc import Callable, MutableMapping
from typing import Any, Protocol

from starlette.types import Scope, Send

_EXTENSION = "penstock.pipe"
_HIGH_WATER_BYTES = 1 << 16


def _nothing() -> None:
    pass


class Pipe(Protocol):
    """The body of one response.

    `on_pause` and `on_resume` tell that the client reads more slowly than we write, and that it has
    caught up. What is written meanwhile is kept in memory, so little should be.
    """

    on_pause: Callable[[], None]
    on_resume: Callable[[], None]

    @property
    def is_paused(self) -> bool: ...

    def write(self, data: bytes) -> None:
        """One piece; lost if the client is gone. Only after `http.response.start`."""

    async def flush(self) -> None:
        """Until whoever sends the end of the body may do so."""

    def close(self) -> None: ...


class SocketPipe:
    """Straight to a connection, as chunks; `is_bare`: without their framing (HTTP/1.0)."""

    def __init__(self, transport: asyncio.WriteTransport, is_paused: Callable[[], bool]) -> None:
        self._transport = transport
        self._is_paused = is_paused
        self.is_bare = False
        self.on_pause: Callable[[], None] = _nothing
        self.on_resume: Callable[[], None] = _nothing

    @property
    def is_paused(self) -> bool:
        return self._is_paused()

    def write(self, data: bytes) -> None:
        transport = self._transport
        if not transport.is_closing():
            transport.write(data if self.is_bare else b"%x\r\n%b\r\n" % (len(data), data))

    async def flush(self) -> None:
        pass  # the end takes the same way

    def close(self) -> None:
        self.on_pause = self.on_resume = _nothing


class QueuedPipe:
    """Hands pieces to `send` of any ASGI server, as many at once as have come meanwhile."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._pieces: list[bytes] = []
        self._num_bytes = 0
        self._sending: asyncio.Task[None] | None = None
        self.is_paused = False
        self.on_pause: Callable[[], None] = _nothing
        self.on_resume: Callable[[], None] = _nothing

    def write(self, data: bytes) -> None:
        self._pieces.append(data)
        self._num_bytes += len(data)
        if self._sending is None:
            self._sending = asyncio.ensure_future(self._send_all())
        if self._num_bytes > _HIGH_WATER_BYTES and not self.is_paused:
            self.is_paused = True
            self.on_pause()

    async def flush(self) -> None:
        if self._sending is not None:
            await self._sending

    def close(self) -> None:
        self.on_pause = self.on_resume = _nothing
        if self._sending is not None:
            self._sending.cancel()

    async def _send_all(self) -> None:
        try:
            while self._pieces:
                body = b"".join(self._pieces)
                self._pieces.clear()
                self._num_bytes = 0
                await self._send({"type": "http.response.body", "body": body, "more_body": True})
                if self.is_paused:
                    self.is_paused = False
                    self.on_resume()
        except OSError:
            pass  # the client is gone; whoever waits for that hears of it
        finally:
            self._sending = None


def offer_pipe(scope: MutableMapping[str, Any], pipe: Pipe) -> None:
    """To the application, by the server."""
    scope["extensions"] = {_EXTENSION: pipe}


def pipe_of(scope: Scope, send: Send) -> Pipe:
    pipe: Pipe | None = (scope.get("extensions") or {}).get(_EXTENSION)
    return QueuedPipe(send) if pipe is None else pipe
