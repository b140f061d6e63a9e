"""Typed message pipes over Unix sockets: a `Sender` pushes, a `Receiver` pulls.

A receiver listens at an address inside a private folder, so only this user reaches it (`address`).
What a sender has sent is the system's: it arrives even if the sender's process ends at once.
Queues are bounded: a sender whose peer has stopped reading gets `ChannelFull` instead of growing
without end.
"""

import asyncio
import contextlib
import os
import select
import selectors
import socket
import struct
import threading
import time
from collections import deque
from typing import Any, Protocol

from penstock.errors import BackendError
from penstock.ipc import messages

MAX_QUEUED_MESSAGES = 100_000
_HEAD = struct.Struct("<I")  # of a frame: how many bytes follow
_SOCKET_BYTES = 4 << 20  # asked for; the system may give less
_READ_BYTES = 1 << 18
_RETRY_S = 0.02  # while nobody listens at the address
_LINGER_S = 1.0


class ChannelFull(BackendError):
    """The peer does not read any more."""


class Peer(Protocol):
    """Whoever takes messages, here or over the network (`link.Link`)."""

    def send(self, message: messages.Message) -> None: ...


class Sender:
    """For any thread. A thread of its own sends what the socket does not take at once, and all that
    is sent before there is a receiver at the address, or after it was started again."""

    def __init__(self, peer: str) -> None:
        self._address = peer
        self._socket: socket.socket | None = None
        self._waiting: deque[bytes] = deque()
        self._num_sent = 0  # bytes of the first that waits
        self._is_sending_later = False
        self._ends_at: float | None = None  # once it is closed
        self._lock = threading.Lock()

    def send(self, message: messages.Message) -> None:
        """Does not wait."""
        self.send_encoded(messages.encode(message), type(message).__name__)

    def send_encoded(self, payload: bytes, name: str) -> None:
        with self._lock:
            if len(self._waiting) >= MAX_QUEUED_MESSAGES:
                raise ChannelFull(f"{name} not sent: the peer has stopped reading")
            self._waiting.append(_HEAD.pack(len(payload)) + payload)
            if not self._is_sending_later and not self._send_some():
                self._is_sending_later = True
                threading.Thread(target=self._send_later, name="sender", daemon=True).start()

    def close(self) -> None:
        """What waits may still be taken for a second."""
        with self._lock:
            self._ends_at = time.monotonic() + _LINGER_S
            if not self._is_sending_later:
                self._disconnect()

    def _send_some(self) -> bool:
        """As much as the socket takes; whether that was all."""
        try:
            if self._socket is None and self._waiting:
                self._connect()
            while self._waiting:
                assert self._socket is not None
                frame = self._waiting[0]
                rest = memoryview(frame)[self._num_sent :] if self._num_sent else frame
                self._num_sent += self._socket.send(rest)
                if self._num_sent == len(frame):
                    self._waiting.popleft()
                    self._num_sent = 0
        except BlockingIOError:
            return False
        except OSError:  # nobody is there, or not any more: who comes next gets whole frames
            self._disconnect()
            return False
        return True

    def _send_later(self) -> None:
        while True:
            with self._lock:
                is_over = self._ends_at is not None and time.monotonic() > self._ends_at
                if self._send_some() or is_over:
                    self._is_sending_later = False
                    if self._ends_at is not None:
                        self._disconnect()
                    return
                connection = self._socket
            if connection is None:
                time.sleep(_RETRY_S)
            else:
                poll = select.poll()
                poll.register(connection, select.POLLOUT)
                poll.poll(_LINGER_S * 1000)

    def _connect(self) -> None:
        made = socket.socket(socket.AF_UNIX)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
        made.setblocking(False)
        try:
            made.connect(self._address)
        except OSError:
            made.close()
            raise
        self._socket = made

    def _disconnect(self) -> None:
        self._num_sent = 0
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class _Arrivals:
    """Whole messages, of all who have connected; in order, those of one sender."""

    def __init__(self, bind: str, union: Any) -> None:
        """`union`: of the messages; None: they stay bytes."""
        self.address = bind
        self._decode = (lambda frame: frame) if union is None else messages.decoder(union).decode
        with contextlib.suppress(FileNotFoundError):  # of a process that ran before this one
            os.unlink(bind)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(bind)
        self._listener.listen(1024)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._frames: deque[bytes] = deque()

    def _next(self, timeout_s: float | None) -> Any | None:
        """None after so long without a message."""
        while not self._frames:
            if not (ready := self._selector.select(timeout_s)):
                return None
            for key, _ in ready:
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._read(key.fileobj, key.data)
        return self._decode(self._frames.popleft())

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.setblocking(False)
        self._selector.register(connection, selectors.EVENT_READ, bytearray())

    def _read(self, connection: Any, read: bytearray) -> None:
        """`read`: bytes of a frame that has not come to its end."""
        try:
            part = connection.recv(_READ_BYTES)
        except OSError:
            part = b""
        if not part:
            self._selector.unregister(connection)
            connection.close()
            return
        read += part
        begin = 0
        while len(read) >= begin + _HEAD.size:
            first = begin + _HEAD.size
            end = first + _HEAD.unpack_from(read, begin)[0]
            if len(read) < end:
                break
            self._frames.append(bytes(read[first:end]))
            begin = end
        del read[:begin]

    def close(self) -> None:
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()


class Receiver(_Arrivals):
    """Yields messages of `union` in order of arrival."""

    def receive(self, timeout_ms: int) -> Any | None:
        """The next message, or None after `timeout_ms` (0: what is already here; -1: for ever)."""
        return self._next(None if timeout_ms < 0 else timeout_ms / 1000)


class AsyncReceiver(_Arrivals):
    """The same in the running event loop, which watches all connections by one descriptor."""

    def __init__(self, bind: str, union: Any) -> None:
        super().__init__(bind, union)
        self._loop = asyncio.get_running_loop()
        self._fileno: int = self._selector.fileno()  # type: ignore[attr-defined]
        self._is_watched = False
        self._waiter: asyncio.Future[None] | None = None

    async def receive(self) -> Any:
        """The next message. One caller at a time."""
        while True:
            if (message := self.receive_waiting()) is not None:
                return message
            await self._until_signalled()

    def receive_waiting(self) -> Any | None:
        """The next message if it is already here."""
        return self._next(0)

    async def _until_signalled(self) -> None:
        assert self._waiter is None, "a receiver has one reader"
        if not self._is_watched:
            self._loop.add_reader(self._fileno, self._on_signal)
            self._is_watched = True
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _on_signal(self) -> None:
        if self._waiter is None:
            self._unwatch()  # nobody looks: it would be called over and over
        elif not self._waiter.done():
            self._waiter.set_result(None)

    def _unwatch(self) -> None:
        if self._is_watched:
            self._loop.remove_reader(self._fileno)
            self._is_watched = False

    def close(self) -> None:
        self._unwatch()
        super().close()
