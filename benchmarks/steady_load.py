"""A full server to which requests come evenly: the gaps between a stream's tokens, and the rate.

Each of `count` slots asks, reads its answer to the end and asks again. The slots begin one after
the other over the time that one answer takes, so from then on a prompt arrives as often as an
answer ends, and what is measured is the server among prompts and answers at once. Plain sockets in
a few processes; an event is counted, not parsed, and is one token.
"""

import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.queues import Queue

_EVENT, _END = b"data: {", b"data: [DONE]\n\n"
_OK = b"HTTP/1.1 200 OK"


@dataclass(slots=True)
class Seen:
    """What came between the two times of a measurement."""

    num_tokens: int = 0
    gaps_s: list[float] = field(default_factory=list)  # between chunks of one stream
    firsts_s: list[float] = field(default_factory=list)  # from asking to the first chunk
    problems: list[str] = field(default_factory=list)

    def add(self, other: "Seen") -> None:
        self.num_tokens += other.num_tokens
        self.gaps_s += other.gaps_s
        self.firsts_s += other.firsts_s
        self.problems += other.problems


@dataclass(slots=True)
class _Slot:
    """One client: its requests, one after the other."""

    requests: Sequence[bytes]
    begins_at: float
    next: int = 0
    connection: socket.socket | None = None
    asked_at: float = 0.0
    last_at: float = 0.0
    tail: bytes = b""

    def ask(self, port: int) -> None:
        self.connection = socket.create_connection(("127.0.0.1", port))
        self.connection.sendall(self.requests[self.next % len(self.requests)])
        self.connection.setblocking(False)
        self.next += 1
        self.asked_at, self.last_at, self.tail = time.monotonic(), 0.0, b""


def load(
    port: int, requests: Sequence[bytes], count: int, ramp_s: float, watch_s: float, processes: int
) -> Seen:
    """`count` slots share `requests`; measured for `watch_s` once all of them run."""
    context = get_context("spawn")
    results: Queue[Seen] = context.Queue()
    begin = time.monotonic() + 5.0  # the readers are up by then
    readers = []
    for process in range(processes):
        slots = [
            _Slot(requests[i::count], begin + ramp_s * i / count)
            for i in range(process, count, processes)
        ]
        arguments = (port, slots, begin + ramp_s, begin + ramp_s + watch_s, results)
        readers.append(context.Process(target=_read, args=arguments))
    for reader in readers:
        reader.start()
    total = Seen()
    for _ in readers:
        total.add(results.get(timeout=ramp_s + watch_s + 120))
    for reader in readers:
        reader.join()
    return total


def _read(
    port: int, slots: list[_Slot], watch_from: float, until: float, results: "Queue[Seen]"
) -> None:
    """One process. The clock is the machine's, so it is the same in all of them."""
    selector, seen = selectors.DefaultSelector(), Seen()
    waiting = sorted(slots, key=lambda slot: -slot.begins_at)
    while (now := time.monotonic()) < until and not seen.problems:
        while waiting and waiting[-1].begins_at <= now:
            slot = waiting.pop()
            slot.ask(port)
            assert slot.connection is not None
            selector.register(slot.connection, selectors.EVENT_READ, slot)
        wake_at = min(until, waiting[-1].begins_at) if waiting else until
        if not selector.get_map():
            time.sleep(max(0.0, wake_at - now))
            continue
        for key, _ in selector.select(max(0.0, wake_at - now)):
            if _take(key.data, seen, watch_from):
                slot = key.data
                selector.unregister(slot.connection)
                slot.connection.close()
                slot.ask(port)
                selector.register(slot.connection, selectors.EVENT_READ, slot)
    for slot in slots:
        if slot.connection is not None:
            slot.connection.close()
    results.put(seen)


def _take(slot: _Slot, seen: Seen, watch_from: float) -> bool:
    """Whether the answer has ended."""
    assert slot.connection is not None
    try:
        received = slot.connection.recv(1 << 16)
    except OSError as error:
        received = str(error).encode()
    now = time.monotonic()
    if not slot.tail and not received.startswith(_OK):
        seen.problems.append(repr(received[:300]))
        return False
    carried = slot.tail[1 - len(_EVENT) :] + received  # an event's mark may be cut in two
    num_new = carried.count(_EVENT)
    has_ended = _END in slot.tail[-len(_END) :] + received
    if num_new:
        if now >= watch_from:
            seen.num_tokens += num_new
            if slot.last_at:
                seen.gaps_s.append(now - slot.last_at)
            else:
                seen.firsts_s.append(now - slot.asked_at)
        slot.last_at = now
    if not received and not has_ended:
        seen.problems.append(f"a stream was cut off after {slot.tail!r}")
    slot.tail = (slot.tail + received)[-64:]
    return has_ended
