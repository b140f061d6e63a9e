"""`Link`: typed messages between two processes over TCP, for ranks on other machines.

Both ends prove that they know a secret (HMAC-SHA256 over two nonces) before a message is decoded.
Each frame has a MAC over its number and bytes, under a key of this connection: nothing can be
added, changed or sent again. Nothing is encrypted. Frames and what waits to be read are bounded.
"""

import hashlib
import hmac
import os
import queue
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from penstock.errors import BackendError
from penstock.ipc import messages
from penstock.ipc.channel import ChannelFull

Side = Literal["rank 0", "worker"]

MAX_FRAME_BYTES = 256 << 20  # bitmasks of 2048 rows and a vocabulary of 256 Ki are 64 MiB
HANDSHAKE_S = 10.0
_MAX_WAITING = 10_000  # messages
_SEND_S = 60.0  # for which a peer may not read
# A machine that has gone without a word is noticed after some 15 s.
_PROBE_AFTER_S, _PROBE_EVERY_S, _NUM_PROBES = 5, 2, 5
_MAGIC = b"penstock ranks 1"
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_MAC_BYTES = 16
_HEAD = struct.Struct("<I16s")


class LinkRefused(BackendError):
    """The other side does not know the secret, or is something else."""


class Link:
    """One connection, after its handshake. Messages of `union` come in the order of sending.

    A thread reads from the beginning on. `on_end` is called in it once nothing more will come, with
    the reason where there is one besides the end of the connection.
    """

    def __init__(self, connection: socket.socket, secret: bytes, side: Side, union: Any) -> None:
        connection.settimeout(HANDSHAKE_S)
        _tune(connection)
        self.local_address: str = connection.getsockname()[0]
        self.peer_address: str = connection.getpeername()[0]
        self._socket = connection
        self._send_key, self._receive_key = _shake_hands(connection, secret, side)
        connection.settimeout(None)
        self._decoder = messages.decoder(union)
        self._num_sent = self._num_received = 0
        self._lock = threading.Lock()  # of sending
        self._waiting: queue.Queue[Any] = queue.Queue(_MAX_WAITING)

    def listen(
        self, on_end: Callable[[str], None], on_message: Callable[[Any], None] | None = None
    ) -> None:
        """Read from now on. `on_message`: in place of `receive`, in the reading thread."""
        put = on_message or self._waiting.put

        def read() -> None:
            reason = ""
            try:
                while True:
                    put(self._read())
            except EOFError:
                pass
            except (OSError, BackendError, msgspec.MsgspecError) as error:
                reason = str(error)
            on_end(reason)

        threading.Thread(target=read, name=f"link to {self.peer_address}", daemon=True).start()

    def receive(self) -> Any:
        """The next message; waits for it. `on_end` is who says that none will come."""
        return self._waiting.get()

    def receive_first(self, timeout_s: float | None) -> Any:
        """Before `listen`: the next message."""
        self._socket.settimeout(timeout_s)
        try:
            return self._read()
        finally:
            self._socket.settimeout(None)

    def send(self, message: messages.Message) -> None:
        payload = messages.encode(message)
        if len(payload) > MAX_FRAME_BYTES:
            raise BackendError(f"{type(message).__name__} of {len(payload)} bytes does not travel")
        with self._lock:
            mac = _mac(self._send_key, self._num_sent, payload)
            self._num_sent += 1
            try:
                self._socket.sendall(_HEAD.pack(len(payload), mac) + payload)
            except BlockingIOError:  # SO_SNDTIMEO
                name = type(message).__name__
                raise ChannelFull(f"{name} not sent: the peer has stopped reading") from None
            except OSError as error:
                raise BackendError(f"{type(message).__name__} not sent: {error}") from None

    def close(self) -> None:
        """The other side reads what was sent, then the end."""
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def _read(self) -> Any:
        length, mac = _HEAD.unpack(_exactly(self._socket, _HEAD.size))
        if length > MAX_FRAME_BYTES:
            raise BackendError(f"a frame of {length} bytes; at most {MAX_FRAME_BYTES} are taken")
        payload = _exactly(self._socket, length)
        if not hmac.compare_digest(mac, _mac(self._receive_key, self._num_received, payload)):
            raise BackendError("a frame that the other side has not sent")
        self._num_received += 1
        return self._decoder.decode(payload)


def _shake_hands(connection: socket.socket, secret: bytes, side: Side) -> tuple[bytes, bytes]:
    """Keys of what we send and of what we receive."""
    own = os.urandom(_NONCE_BYTES)
    try:
        connection.sendall(_MAGIC + own)
        hello = _exactly(connection, len(_MAGIC) + _NONCE_BYTES)
        if not hello.startswith(_MAGIC):
            raise LinkRefused("something that is no rank, or of another version")
        theirs = hello[len(_MAGIC) :]
        nonces = own + theirs if side == "rank 0" else theirs + own
        other: Side = "worker" if side == "rank 0" else "rank 0"

        def derived(purpose: str) -> bytes:
            return hmac.digest(secret, purpose.encode() + nonces, "sha256")

        # A worker proves itself first: who asks learns nothing that could be tried offline.
        if side == "worker":
            connection.sendall(derived("worker"))
        proof = _exactly(connection, _PROOF_BYTES)
        if not hmac.compare_digest(proof, derived(other)):
            raise LinkRefused("it does not know the secret")
        if side == "rank 0":
            connection.sendall(derived("rank 0"))
    except (OSError, EOFError) as error:
        raise LinkRefused(str(error) or "it has closed the connection") from None
    return derived(f"sent by {side}"), derived(f"sent by {other}")


def _exactly(connection: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        if not (part := connection.recv(min(size - len(found), 1 << 20))):
            raise EOFError
        found += part
    return bytes(found)


def _mac(key: bytes, number: int, payload: bytes) -> bytes:
    made = hashlib.blake2b(struct.pack("<Q", number), digest_size=_MAC_BYTES, key=key)
    made.update(payload)
    return made.digest()


def _tune(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(_SEND_S), 0))
    for name, value in (
        ("TCP_KEEPIDLE", _PROBE_AFTER_S),
        ("TCP_KEEPINTVL", _PROBE_EVERY_S),
        ("TCP_KEEPCNT", _NUM_PROBES),
        # While something waits for an acknowledgment no probe is sent.
        ("TCP_USER_TIMEOUT", 1000 * (_PROBE_AFTER_S + _PROBE_EVERY_S * _NUM_PROBES)),
    ):
        if (option := getattr(socket, name, None)) is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
