"""HTTP/1.1 for thousands of responses at once: little work for each piece that arrives.

Every connection is an `asyncio.Protocol` around a parser in C; what it finds in a body goes
straight to a reader. Connections are kept and used again. Knows nothing of what the bodies mean.
"""

import asyncio
import resource
import socket
import ssl
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

from penstock.errors import BackendError, ConfigError

_MAX_CONNECTING = 64  # at a time
_OTHER_FILES = 64
_PORTS = {"http": 80, "https": 443}


def allow_connections(num: int) -> None:
    """A connection is an open file, of which a process may have few by default."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = num + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        if most < needed:
            raise ConfigError(
                f"{num} requests at once need {needed} open files, this process may have {hard}: "
                "lower --max-concurrency, or raise `ulimit -n`"
            )


class HttpError(BackendError):
    """No whole response came."""


class Reader(Protocol):
    """Who reads a response. What `take` raises ends the exchange."""

    def begin(self, status: int) -> None: ...

    def take(self, body: bytes) -> None: ...


class HttpClient:
    """All connections to one server. Use it inside one event loop; `close` in the end."""

    def __init__(self, url: str, headers: dict[str, str]) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in _PORTS or parts.hostname is None:
            raise ConfigError(f"'{url}' is no address like http://host:8000")
        self._host, self._port = parts.hostname, parts.port or _PORTS[parts.scheme]
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._addresses: list[str] = []
        self._prefix = parts.path.rstrip("/")
        common = {"Host": parts.netloc.rpartition("@")[2], **headers}
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in common.items())
        self._idle: list[_Connection] = []
        self._all: set[_Connection] = set()

    def post_request(self, path: str, body: bytes) -> bytes:
        """The bytes for `exchange`; making them ahead keeps the work off the clock."""
        length = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        return self._head("POST", path, length) + body

    def get_request(self, path: str) -> bytes:
        return self._head("GET", path)

    async def exchange(self, request: bytes, reader: Reader) -> None:
        """Send a request and return when its response has ended."""
        while True:
            connection = self._kept()
            is_kept = connection is not None
            if connection is None:
                connection = await self._connect()
            try:
                await connection.exchange(request, reader)
            except HttpError:
                # The server may close a kept connection just as it is used again.
                if is_kept and not connection.has_answered:
                    continue
                raise
            finally:
                self._put_back(connection)
            return

    async def open_ahead(self, num: int) -> None:
        """So many connections, each of which the server has answered on.

        A flood of new ones overflows the queue in which a busy server finds them; some are then
        heard only when the kernel tries again, seconds later.
        """
        request = self.get_request("/health")
        room = asyncio.Semaphore(_MAX_CONNECTING)

        async def open_one() -> None:
            async with room:
                connection = await self._connect()
                try:
                    await connection.exchange(request, _Whole())
                finally:
                    self._put_back(connection)

        # What goes wrong here shows again where it counts.
        await asyncio.gather(*(open_one() for _ in range(num)), return_exceptions=True)

    async def fetch(self, request: bytes) -> tuple[int, bytes]:
        """Status and body of a small response."""
        reader = _Whole()
        await self.exchange(request, reader)
        return reader.status, bytes(reader.body)

    def close(self) -> None:
        for connection in self._all:
            connection.close()

    def _head(self, method: str, path: str, more: str = "") -> bytes:
        return f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._headers}{more}\r\n".encode()

    def _kept(self) -> "_Connection | None":
        while self._idle:
            if (connection := self._idle.pop()).is_usable:
                return connection
        return None

    async def _connect(self) -> "_Connection":
        try:
            connection = await self._open()
        except OSError as error:
            raise HttpError(f"cannot connect to {self._host}:{self._port}: {error}") from None
        self._all.add(connection)
        return connection

    async def _open(self) -> "_Connection":
        """The name is looked up once; of its addresses the first that answers is used."""
        loop = asyncio.get_running_loop()
        if not self._addresses:
            found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
            self._addresses = [str(one[4][0]) for one in found]
        name = self._host if self._ssl else None
        for address in list(self._addresses):
            try:
                _, connection = await loop.create_connection(
                    _Connection, address, self._port, ssl=self._ssl, server_hostname=name
                )
            except OSError as error:
                refused = error
            else:
                self._addresses = [address]
                return connection
        raise refused

    def _put_back(self, connection: "_Connection") -> None:
        if connection.is_usable:
            self._idle.append(connection)
        else:
            connection.close()
            self._all.discard(connection)


class _Whole:
    """Keeps everything."""

    def __init__(self) -> None:
        self.status = 0
        self.body = bytearray()

    def begin(self, status: int) -> None:
        self.status = status

    def take(self, body: bytes) -> None:
        self.body += body


class _Connection(asyncio.Protocol):
    """One exchange at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._reader: Reader | None = None
        self._ended: asyncio.Future[None] | None = None
        self._is_framed = False
        self.has_answered = False
        self._is_kept_alive = True

    @property
    def is_usable(self) -> bool:
        """For another exchange."""
        return self._transport is not None and self._is_kept_alive and self._ended is None

    async def exchange(self, request: bytes, reader: Reader) -> None:
        if self._transport is None:
            raise HttpError("the server has closed the connection")
        self._ended = asyncio.get_running_loop().create_future()
        self._reader, self.has_answered, self._is_framed = reader, False, False
        self._transport.write(request)
        await self._ended
        self._ended = None

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._is_kept_alive = False
            self._fail(error.__context__ or error)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if error is None and self.has_answered and not self._is_framed:
            self.on_message_complete()  # a body without a length ends with the connection
        else:
            self._fail(error or HttpError("the connection was closed before the answer's end"))

    # What the parser calls.

    def on_header(self, name: bytes, _value: bytes) -> None:
        self._is_framed |= name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        if self._reader is not None:
            self.has_answered = True
            self._reader.begin(self._parser.get_status_code())

    def on_body(self, body: bytes) -> None:
        if self._reader is not None:
            self._reader.take(body)

    def on_message_complete(self) -> None:
        self._is_kept_alive = self._parser.should_keep_alive()
        self._reader = None
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def _fail(self, error: BaseException) -> None:
        self._reader = None
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(
                error if isinstance(error, HttpError) else HttpError(str(error))
            )
