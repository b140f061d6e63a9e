"""`Connections`: all connections of one API server, and what is due on each of them.

One periodic look at all of them instead of a timer for each. Knows no HTTP: a connection itself
says what it waits for and since when (`http.HttpProtocol`).
"""

import asyncio
import select
from collections import Counter
from collections.abc import Iterable
from typing import Protocol

from penstock.config.http import HttpConfig

_MAX_PERIOD_S = 0.5  # also how late the end of a connection that is not read from may be noticed
_PERIODS_PER_TIMEOUT = 4


class Connection(Protocol):
    @property
    def address(self) -> str | None: ...

    @property
    def is_deaf(self) -> bool:
        """Whether nothing is read from it now, so that the client could leave unnoticed."""

    def fileno(self) -> int: ...

    def check(self, now: float, elapsed_s: float) -> None:
        """Give up on a client that is overdue. `elapsed_s`: since the last call."""

    def close_after_response(self) -> None: ...

    def end_request(self) -> None:
        """Respond with 503 to a request that has not arrived whole."""

    def abort(self) -> None: ...


class Connections:
    def __init__(self, config: HttpConfig) -> None:
        self.config = config
        self.is_closing = False  # every response is the last of its connection
        self._open: set[Connection] = set()
        self._num_by_address: Counter[str | None] = Counter()
        self._timer: asyncio.TimerHandle | None = None
        self._last_look = 0.0
        shortest = min(config.keep_alive_timeout, config.head_timeout, config.body_timeout)
        self._period_s = min(_MAX_PERIOD_S, shortest / _PERIODS_PER_TIMEOUT)

    def __len__(self) -> int:
        return len(self._open)

    def add(self, one: Connection) -> bool:
        """False: its address has too many."""
        self._open.add(one)
        self._num_by_address[one.address] += 1
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._last_look = loop.time()
            self._timer = loop.call_later(self._period_s, self._look)
        limit = self.config.max_connections_per_address
        return not limit or one.address is None or self._num_by_address[one.address] <= limit

    def remove(self, one: Connection) -> None:
        if one not in self._open:
            return
        self._open.remove(one)
        self._num_by_address[one.address] -= 1
        if not self._num_by_address[one.address]:
            del self._num_by_address[one.address]

    def close_after_responses(self) -> None:
        """Announce with every response from now on that its connection ends."""
        self.is_closing = True
        for one in self._open:
            one.close_after_response()

    def end_requests(self) -> None:
        for one in list(self._open):
            one.end_request()

    def abort(self) -> None:
        for one in list(self._open):
            one.abort()

    def _look(self) -> None:
        self._timer = None
        if not self._open:
            return
        loop = asyncio.get_running_loop()
        now = loop.time()
        elapsed_s, self._last_look = now - self._last_look, now
        # First, so that an error in what follows cannot be the last look.
        self._timer = loop.call_later(self._period_s, self._look)
        for one in _hung_up(one for one in self._open if one.is_deaf):
            one.abort()
        for one in list(self._open):
            one.check(now, elapsed_s)


def has_unread(fileno: int) -> bool:
    """Whether something has arrived that the event loop has not come to yet."""
    poll = select.poll()
    poll.register(fileno, select.POLLIN)
    return bool(poll.poll(0))


def _hung_up(deaf: Iterable[Connection]) -> list[Connection]:
    """Those whose other side has closed, though there may be bytes before the end to read."""
    poll, by_fileno = select.poll(), {}
    for one in deaf:
        if (fileno := one.fileno()) >= 0:
            by_fileno[fileno] = one
            poll.register(fileno, select.POLLRDHUP)
    return [by_fileno[fileno] for fileno, _ in poll.poll(0)] if by_fileno else []
