"""Reads many streamed answers at once, cheaply enough not to be what is measured.

Several processes of plain sockets; an event is counted, not parsed. What is wrong with a stream
(refused, cut off, miscounted) is told in words.
"""

import json
import re
import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.queues import Queue
from typing import Any

_EVENT = b"data: {"
_END = b"data: [DONE]\n\n"
_KEPT = 1024  # bytes of the end, which hold the usage
_MAX_CONNECTING = 512  # at a time by one process, so that the server's queue does not overflow


@dataclass(frozen=True, slots=True)
class Outcome:
    """One stream: seconds to its first event and from there to its last; `problem` if it failed."""

    first_s: float
    rest_s: float
    problem: str | None


def request_bytes(path: str, body: dict[str, Any], usage: bool = True) -> bytes:
    """A streamed request; with `usage` one more event at its end counts the tokens."""
    asked = body | {"stream": True, "stream_options": {"include_usage": usage}}
    data = json.dumps(asked).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def read_all(
    port: int, requests: Sequence[bytes], num_tokens: int, num_processes: int
) -> tuple[float, list[Outcome]]:
    """Send all at once; the seconds until the last has ended, and what became of each."""
    context = get_context("fork")
    results: Queue[list[Outcome]] = context.Queue()
    started = time.monotonic()
    readers = [
        context.Process(target=_read, args=(port, requests[i::num_processes], num_tokens, results))
        for i in range(num_processes)
    ]
    for reader in readers:
        reader.start()
    outcomes = [one for _ in readers for one in results.get()]
    seconds = time.monotonic() - started
    for reader in readers:
        reader.join()
    return seconds, outcomes


@dataclass(slots=True)
class _Stream:
    """One connection's answer so far."""

    connection: socket.socket
    sent_at: float
    first_at: float = 0.0
    num_events: int = 0
    head: bytes = b""
    end: bytes = b""

    def take(self, received: bytes) -> bool:
        """Whether it has ended."""
        if not self.head:
            self.head = received[:15]
        carried = self.end[1 - len(_EVENT) :] + received  # an event's mark may be cut in two
        num_new = carried.count(_EVENT)
        if num_new and not self.num_events:
            self.first_at = time.monotonic()
        self.num_events += num_new
        self.end = (self.end + received)[-_KEPT:]
        return not received or self.end.endswith((_END, _END + b"\r\n", _END + b"\r\n0\r\n\r\n"))

    def outcome(self, num_tokens: int) -> Outcome:
        usage = re.search(rb'"completion_tokens":(\d+)', self.end)
        problem = None
        if self.head != b"HTTP/1.1 200 OK" or _END not in self.end or usage is None:
            problem = f"{self.head!r} ... {self.end[-300:]!r}"
        elif int(usage[1]) != num_tokens:
            problem = f"{int(usage[1])} tokens instead of {num_tokens}"
        elif self.num_events <= num_tokens:  # one per token, and the usage
            problem = f"{num_tokens} tokens came in {self.num_events} events"
        return Outcome(self.first_at - self.sent_at, time.monotonic() - self.first_at, problem)


def _read(
    port: int, requests: Sequence[bytes], num_tokens: int, results: "Queue[list[Outcome]]"
) -> None:
    """One process: its share of the streams until all have ended."""
    selector = selectors.DefaultSelector()
    outcomes: list[Outcome] = []
    waiting, num_connecting = list(reversed(requests)), 0
    while len(outcomes) < len(requests):
        while waiting and num_connecting < _MAX_CONNECTING:
            request = waiting.pop()
            try:
                connection = socket.create_connection(("127.0.0.1", port))
                connection.sendall(request)
            except OSError as error:
                outcomes.append(Outcome(0.0, 0.0, str(error)))
                continue
            connection.setblocking(False)
            selector.register(
                connection, selectors.EVENT_READ, _Stream(connection, time.monotonic())
            )
            num_connecting += 1
        for key, _ in selector.select() if selector.get_map() else ():
            stream: _Stream = key.data
            num_connecting -= not stream.head
            try:
                received = stream.connection.recv(1 << 16)
            except OSError:
                received = b""
            if stream.take(received):
                selector.unregister(stream.connection)
                stream.connection.close()
                outcomes.append(stream.outcome(num_tokens))
    results.put(outcomes)
