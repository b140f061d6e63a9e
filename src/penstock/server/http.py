"""The HTTP protocol of a connection: uvicorn's, with bounds on what is sent and how slowly.

The parser alone has no bound: neither on what is no body (heads, trailers, chunk extensions), nor
on requests sent ahead, nor on time. Every request of a connection hears when the client leaves,
also those behind which others wait. A streamed response gets a short way to the socket (`pipe`).
"""

import asyncio
from collections import deque
from typing import Any

import httptools
import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from penstock.server.connections import Connections, has_unread
from penstock.server.errors import ErrorBody
from penstock.server.pipe import SocketPipe, offer_pipe

MAX_HEAD_BYTES = 64 << 10  # also of trailers, and between two pieces of a body
MAX_PIPELINED = 64  # requests on one connection whose responses are not complete
_IDLE, _HEAD, _BODY = range(3)  # what is being read
_TOO_LONG = f"more than {MAX_HEAD_BYTES} bytes of request head or trailers"


class _Refused(Exception):
    """Raised through the parser."""


class HttpProtocol(HttpToolsProtocol):
    def __init__(self, connections: Connections, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._connections = connections
        self._cycles: deque[RequestResponseCycle] = deque()  # without a complete response, in order
        self._reading = _IDLE
        self._since = self._last_read = self._responded_at = self.loop.time()
        self._num_bare_bytes = 0  # since the last byte of a body, or the end of a head or request
        self._num_body_bytes = 0
        self._takes_more = True
        self._closing_since: float | None = None
        self._pipe: SocketPipe  # one for all: one response at a time is under way

    # What Connections asks for.

    @property
    def address(self) -> str | None:
        return None if self.client is None else self.client[0]

    @property
    def is_deaf(self) -> bool:
        return self.flow.read_paused and not self.transport.is_closing()

    def fileno(self) -> int:
        connection = self.transport.get_extra_info("socket")
        return -1 if connection is None else int(connection.fileno())

    def check(self, now: float, elapsed_s: float) -> None:
        if self.transport.is_closing():
            self._check_closing(now)
        elif self._reading == _IDLE:
            self._check_idle(now)
        elif self._reading == _HEAD:
            self._check_head(now)
        else:
            self._check_body(now, elapsed_s)

    def close_after_response(self) -> None:
        for cycle in self._cycles:
            cycle.keep_alive = False

    def end_request(self) -> None:
        if self._reading == _BODY:
            self._refuse(ErrorBody(503, "shutting_down", "the server is shutting down"))

    def abort(self) -> None:
        self.transport.abort()

    # Bounds in time.

    def _check_closing(self, now: float) -> None:
        """What was written last may still be on its way, but not for ever."""
        if self._closing_since is None:
            self._closing_since = now
        elif now - self._closing_since > self._connections.config.keep_alive_timeout:
            self.transport.abort()

    def _check_idle(self, now: float) -> None:
        idle_s = now - max(self._since, self._responded_at)
        if self._cycles or idle_s <= self._connections.config.keep_alive_timeout:
            return
        # A client may have sent its next request just now; it would be lost without a response.
        if not has_unread(self.fileno()):
            self.transport.close()

    def _check_head(self, now: float) -> None:
        """While a response is under way the next request may take its time."""
        limit_s = self._connections.config.head_timeout
        if not self._cycles and now - max(self._since, self._responded_at) > limit_s:
            self._refuse_late(f"the headers did not arrive within head_timeout, {limit_s:g} s")

    def _check_body(self, now: float, elapsed_s: float) -> None:
        config = self._connections.config
        has_predecessor = bool(self._cycles) and self._cycles[0] is not self.cycle
        if self.flow.read_paused or self.cycle.waiting_for_100_continue or has_predecessor:
            self._last_read = now  # it is we who take our time
            self._since += elapsed_s
        elif now - self._last_read > config.body_timeout:
            self._refuse_late(f"nothing of the body came for {config.body_timeout:g} s")
        elif config.min_body_rate:
            allowed_s = config.body_timeout + self._num_body_bytes / config.min_body_rate
            if now - self._since > allowed_s:
                rate = config.min_body_rate
                self._refuse_late(f"the body comes at less than min_body_rate, {rate} bytes/s")

    def _refuse_late(self, message: str) -> None:
        self._refuse(ErrorBody(408, "request_timeout", message))

    # The connection.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._pipe = SocketPipe(transport, lambda: self.flow.write_paused)
        if not self._connections.add(self):
            limit = self._connections.config.max_connections_per_address
            said = f"{limit} connections from this address are open, no more are accepted"
            self._refuse(ErrorBody(429, "too_many_connections", said, headers={"retry-after": "1"}))

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.remove(self)
        self._tell_gone()
        self.pipeline.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._takes_more:
            return
        self._last_read = self.loop.time()
        self._num_bare_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # answered as if it had not asked for another protocol
        except httptools.HttpParserError as error:
            cause = error.__context__
            if not isinstance(cause, _Refused):
                cause = _Refused("the request is not valid HTTP")
            self._refuse(ErrorBody(400, "invalid_http", str(cause)))
            return
        if self._num_bare_bytes > MAX_HEAD_BYTES:
            self._refuse(ErrorBody(400, "invalid_http", _TOO_LONG))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._pipe.on_pause()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._pipe.on_resume()

    # The parser.

    def on_message_begin(self) -> None:
        self._reading, self._since = _HEAD, self._last_read
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._reading == _HEAD:  # nobody asks for trailers
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self._cycles) >= MAX_PIPELINED:
            self._stop_taking()
        if not self._takes_more:
            return
        is_old = self.parser.get_http_version() == "1.0"
        _check_headers(self.url, self.headers, is_old)
        self._reading, self._since = _BODY, self._last_read
        self._num_bare_bytes = self._num_body_bytes = 0
        offer_pipe(self.scope, self._pipe)  # type: ignore[arg-type]
        app = self.app
        if is_old:
            self.app = _UnframedResponse(app, self._pipe)  # type: ignore[assignment]
        super().on_headers_complete()
        self.app = app
        self._cycles.append(self.cycle)
        if self._connections.is_closing:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        if self._takes_more:
            self._num_bare_bytes = 0
            self._num_body_bytes += len(body)
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._takes_more:
            self._reading, self._since = _IDLE, self._last_read
            self._num_bare_bytes = 0
            super().on_message_complete()

    def on_response_complete(self) -> None:
        self._cycles.popleft()
        self._responded_at = self.loop.time()
        super().on_response_complete()
        self._unset_keepalive_if_required()  # `check` sees to that

    def _stop_taking(self) -> None:
        """So many requests ahead are answered; then the connection ends, and the client may ask
        again for the others.
        """
        self._takes_more = False
        self._cycles[-1].keep_alive = False
        self.flow.pause_reading()

    def _refuse(self, error: ErrorBody) -> None:
        """Say so if that cannot be taken for another request's response, and close."""
        if self._reading == _BODY:
            is_under_way = bool(self._cycles) and self._cycles[0] is self.cycle
            is_next = is_under_way and not self.cycle.response_started
        else:
            is_next = not self._cycles
        self._takes_more = False
        self._tell_gone()
        if self.transport.is_closing():
            return
        if is_next:
            self.transport.write(_error_response(error))
        self.transport.close()

    def _tell_gone(self) -> None:
        for cycle in self._cycles:
            cycle.disconnected = True
            cycle.message_event.set()


def _check_headers(url: bytes, headers: list[tuple[bytes, bytes]], is_old: bool) -> None:
    num_hosts, num_bytes, has_encoding = 0, len(url), False
    for name, value in headers:
        num_bytes += len(name) + len(value)
        num_hosts += name == b"host"
        has_encoding |= name == b"transfer-encoding"
    if num_bytes > MAX_HEAD_BYTES:
        raise _Refused(_TOO_LONG)
    if num_hosts > 1 or not (num_hosts or is_old):
        raise _Refused(f"{num_hosts} Host headers; send one")
    if has_encoding and is_old:
        # Another server on the way may see the end of the body elsewhere.
        raise _Refused("Transfer-Encoding is not part of HTTP/1.0; send Content-Length")


def _error_response(error: ErrorBody) -> bytes:
    body = msgspec.json.encode(error.as_dict())
    lines = [f"{name}: {value}\r\n" for name, value in error.headers.items()]
    head = (
        "content-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n{''.join(lines)}\r\n"
    )
    return STATUS_LINE[error.status] + head.encode() + body


class _UnframedResponse:
    """One of unknown length to HTTP/1.0, which has no chunks: it ends with the connection."""

    def __init__(self, app: ASGIApp, pipe: SocketPipe) -> None:
        self._app = app
        self._pipe = pipe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # uvicorn would say and write chunks; its cycle is told that it need not.
        cycle: RequestResponseCycle = send.__self__  # type: ignore[attr-defined]
        transport = cycle.transport

        async def send_bare(message: Message) -> None:
            if message["type"] == "http.response.start" and _has_no_length(scope, message):
                headers = [*cycle.default_headers, *message["headers"], (b"connection", b"close")]
                lines = [b"%b: %b\r\n" % header for header in headers]
                cycle.response_started, cycle.chunked_encoding = True, False
                self._pipe.is_bare = True
                if not transport.is_closing():
                    transport.write(STATUS_LINE[message["status"]] + b"".join(lines) + b"\r\n")
            elif message["type"] == "http.response.body" and self._pipe.is_bare:
                self._pipe.write(message.get("body", b""))
                if not message.get("more_body", False):
                    await send({"type": "http.response.body"})
            else:
                await send(message)

        await self._app(scope, receive, send_bare)


def _has_no_length(scope: Scope, start: Message) -> bool:
    names = {name.lower() for name, _ in start.get("headers", ())}
    return scope["method"] != "HEAD" and b"content-length" not in names
