"""Typed message pipes over Unix sockets: a `Sender` pushes, a `Receiver` pulls.

A receiver binds an address inside a private folder, so only this user reaches it (`address`).
Queues are bounded: a sender whose peer has stopped reading gets `ChannelFull` instead of growing
without end.
"""

from typing import Any

import zmq
import zmq.asyncio

from penstock.errors import BackendError
from penstock.ipc import messages

MAX_QUEUED_MESSAGES = 100_000


class ChannelFull(BackendError):
    """The peer does not read any more."""


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
    def __init__(self, bind: str, union: Any) -> None:
        self.address = bind
        self._decoder = messages.decoder(union)
        self._socket = _socket(zmq.asyncio.Context.instance(), zmq.PULL)
        self._socket.bind(bind)

    async def receive(self) -> Any:
        return self._decoder.decode(await self._socket.recv())

    def close(self) -> None:
        self._socket.close()
