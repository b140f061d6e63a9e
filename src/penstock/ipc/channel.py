"""Typed message pipes over Unix sockets: a `Sender` pushes, a `Receiver` pulls.

A receiver binds an address inside a private folder, so only this user reaches it (`address`).
Queues are bounded: a sender whose peer has stopped reading gets `ChannelFull` instead of growing
without end.
"""

import asyncio
from typing import Any, Protocol

import zmq

from penstock.errors import BackendError
from penstock.ipc import messages

MAX_QUEUED_MESSAGES = 100_000


class ChannelFull(BackendError):
    """The peer does not read any more."""


class Peer(Protocol):
    """Whoever takes messages, here or over the network (`link.Link`)."""

    def send(self, message: messages.Message) -> None: ...


def _socket(context: Any, kind: int) -> Any:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.setsockopt(zmq.SNDHWM, MAX_QUEUED_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, MAX_QUEUED_MESSAGES)
    return socket


class Sender:
    def __init__(self, peer: str) -> None:
        self._socket = _socket(zmq.Context.instance(), zmq.PUSH)
        self._socket.connect(peer)

    def send(self, message: messages.Message) -> None:
        try:
            self._socket.send(messages.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            raise ChannelFull(
                f"{type(message).__name__} not sent: the peer has stopped reading"
            ) from None

    def close(self) -> None:
        self._socket.close()


class Receiver:
    """Yields messages of `union` in order of arrival."""

    def __init__(self, bind: str, union: Any) -> None:
        self.address = bind
        self._decoder = messages.decoder(union)
        self._socket = _socket(zmq.Context.instance(), zmq.PULL)
        self._socket.bind(bind)

    def receive(self, timeout_ms: int) -> Any | None:
        """The next message, or None after `timeout_ms` (0: what is already here; -1: for ever)."""
        if not self._socket.poll(timeout_ms):
            return None
        return self._decoder.decode(self._socket.recv())

    def close(self) -> None:
        self._socket.close()


class AsyncReceiver:
    """The same in the running event loop, which watches the socket's descriptor. It signals once
    for everything that came since the socket was found empty, so only then is it waited for.
    """

    def __init__(self, bind: str, union: Any) -> None:
        self.address = bind
        self._decoder = messages.decoder(union)
        self._socket = _socket(zmq.Context.instance(), zmq.PULL)
        self._socket.bind(bind)
        self._loop = asyncio.get_running_loop()
        self._fileno: int = self._socket.getsockopt(zmq.FD)
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
        try:
            return self._decoder.decode(self._socket.recv(zmq.NOBLOCK))
        except zmq.Again:
            return None

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
        self._socket.close()
