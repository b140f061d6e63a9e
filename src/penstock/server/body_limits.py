"""What request bodies may take: one of them, and all of an API server. Reads none (see `body`)."""

import asyncio
from collections import deque

from starlette.exceptions import HTTPException

from penstock.config.http import HttpConfig

# Up to this size a body is decoded in the event loop, in about a millisecond, and does not count
# among those in flight: a connection may hold as much before anybody reads it.
SMALL_BYTES = 64 << 10
_SPARE_BYTES = 8 << 20
# Text and ids need 4 to 8, text that is escaped as \uXXXX up to 24.
_BYTES_PER_TOKEN = 64
_MIN_VALUES = 1 << 20  # such as the ids of 127 prompts of 8192 tokens
_RETRY_AFTER_S = 1


class Turns:
    """One of those who ask goes on in every other turn of the event loop: at once if nobody has
    just now, else in the order of asking. The turn between is for those who went on before: with
    one in every turn the first events of a burst come last, with those of the others.
    """

    def __init__(self) -> None:
        self._is_taken = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def take(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._is_taken:
            self._is_taken = True
            loop.call_soon(self._pass_on, loop)
            return
        waiter = loop.create_future()
        self._waiting.append(waiter)
        await waiter

    def _pass_on(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():  # whoever asked may have left
                waiter.set_result(None)
                loop.call_soon(loop.call_soon, self._pass_on, loop)
                return
        self._is_taken = False


class Bodies:
    """The limits of one API server, what its bodies hold now, and whose turn it is."""

    def __init__(self, config: HttpConfig, max_seq_len: int) -> None:
        self._max_in_flight = config.max_body_bytes_in_flight
        derived = _SPARE_BYTES + _BYTES_PER_TOKEN * max_seq_len
        self.max_bytes = config.max_body_bytes or min(derived, self._max_in_flight)
        self.max_values = max(_MIN_VALUES, 2 * max_seq_len)
        self.num_held_bytes = 0
        self.turns = Turns()  # to decode a body in the event loop
        self.large_turn = asyncio.Lock()  # to decode one in a thread

    def hold(self, num_bytes: int) -> None:
        if self.num_held_bytes + num_bytes > self._max_in_flight:
            raise HTTPException(
                429,
                f"bodies that are being read hold {self.num_held_bytes} bytes, at most "
                f"{self._max_in_flight} (max_body_bytes_in_flight) are kept; send it again later",
                {"retry-after": str(_RETRY_AFTER_S), "connection": "close"},
            )
        self.num_held_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        self.num_held_bytes -= num_bytes

    def too_large(self) -> HTTPException:
        # Closing the connection spares us from reading the rest.
        return HTTPException(
            413,
            f"the body is larger than {self.max_bytes} bytes; send less at a time or raise "
            "http_config.max_body_bytes",
            {"connection": "close"},
        )
