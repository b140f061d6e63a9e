"""The HTTP protocol: a bound on what precedes a body, and a short way for streamed answers.

The parser alone has no bound. The short way (`Pipe`) writes a chunk of a body that has begun in
the very call that brings it; through ASGI each would cost a task switch and a message.
"""

from collections.abc import Callable

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 << 10
_EXTENSION = "penstock.pipe"


class Pipe:
    """The body of the answer under way on one connection.

    `on_pause` and `on_resume` tell that the client reads more slowly than we write, and that it has
    caught up. What is written meanwhile is kept in memory, so little should be.
    """

    def __init__(self, protocol: "StreamingHttp") -> None:
        self._protocol = protocol
        self.on_pause: Callable[[], None] = _nothing
        self.on_resume: Callable[[], None] = _nothing

    @property
    def is_paused(self) -> bool:
        return self._protocol.flow.write_paused

    def write(self, data: bytes) -> None:
        """One chunk, at once; lost if the client is gone. Only after `http.response.start`."""
        transport = self._protocol.transport
        if not transport.is_closing():
            transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def close(self) -> None:
        self.on_pause = self.on_resume = _nothing


def pipe_of(scope: Scope) -> Pipe:
    pipe: Pipe = scope["extensions"][_EXTENSION]
    return pipe


def _nothing() -> None:
    pass


class StreamingHttp(HttpToolsProtocol):
    """Answers 400 and closes when a request line and headers go on after `MAX_HEAD_BYTES`."""

    _num_head_bytes = 0
    _in_head = True
    _pipe: Pipe | None = None

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._num_head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._num_head_bytes > MAX_HEAD_BYTES:
            self.send_400_response(f"The request head is larger than {MAX_HEAD_BYTES} bytes.")

    def on_headers_complete(self) -> None:
        self._in_head = False
        if self._pipe is None:
            self._pipe = Pipe(self)  # one answer at a time is under way on a connection
        self.scope["extensions"] = {_EXTENSION: self._pipe}  # type: ignore[dict-item]
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head = True
        self._num_head_bytes = 0
        super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._pipe is not None:
            self._pipe.on_pause()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._pipe is not None:
            self._pipe.on_resume()
