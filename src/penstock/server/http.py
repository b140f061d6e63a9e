"""The HTTP protocol with a bound on what precedes a body; the parser alone has none."""

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 << 10


class BoundedHttp(HttpToolsProtocol):
    """Answers 400 and closes when a request line and headers go on after `MAX_HEAD_BYTES`."""

    _num_head_bytes = 0
    _in_head = True

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._num_head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._num_head_bytes > MAX_HEAD_BYTES:
            self.send_400_response(f"The request head is larger than {MAX_HEAD_BYTES} bytes.")

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head = True
        self._num_head_bytes = 0
        super().on_message_complete()
