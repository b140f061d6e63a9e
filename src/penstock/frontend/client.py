"""`EngineClient`: requests down to the engine(s), token deltas up, one terminal delta per request.

Of several engines `routing` picks one for each submit. Whatever happens to an engine, every request
it held ends: with what the engine said, or with `FinishReason.ERROR`. Those that had no token yet
go to another engine, once. One that is started again is greeted again and then takes requests like
the others. Knows no text.
Everything here runs in one event loop; only `engine_died` may be called from other threads.
"""

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from penstock import log
from penstock.errors import BackendError, PenstockError, WorkerDied
from penstock.frontend.capacity import Capacity, Holdings
from penstock.frontend.routing import Router
from penstock.ipc.address import address
from penstock.ipc.channel import AsyncReceiver, ChannelFull, Sender
from penstock.ipc.messages import (
    PROTOCOL_VERSION,
    Abort,
    Deltas,
    EngineInfo,
    Fatal,
    Hello,
    Ready,
    Stats,
    Submit,
    ToClient,
)
from penstock.ipc.shared import Row
from penstock.types.outputs import TokenDelta
from penstock.types.request import FinishReason, Request, request_id
from penstock.types.stats import GAUGES, EngineCounters, IterationStats, added

_log = log.get(__name__)

# A busy engine reports several times a second. A step may still compile a kernel for a while.
SILENCE_LIMIT_S = 60.0
_MAX_AT_ONCE = 4  # messages in a turn of the event loop

Sink = Callable[[TokenDelta], None]


class _EngineLink:
    """One engine as the client sees it."""

    def __init__(
        self,
        engine: str,
        own: str,
        max_stats_len: int,
        loop: asyncio.AbstractEventLoop,
        holdings: Holdings,
    ) -> None:
        self.sender = Sender(engine)
        self.receiver = AsyncReceiver(own, ToClient)
        self._loop = loop
        self.ready = self._new_future()
        self.sinks: dict[int, Sink] = {}  # of every open request
        self._silent: dict[int, Request] = {}  # that may move, until a delta
        self._holdings = holdings
        self._held: dict[int, tuple[int, int]] = {}  # their tenants and prompt tokens
        self.counters = EngineCounters()
        self._past = EngineCounters()  # totals of the processes that ran before this one
        self.iterations: deque[IterationStats] = deque(maxlen=max_stats_len)
        self.last_heard = 0.0
        self.failure: str | None = None
        self.listener: asyncio.Task[None] | None = None

    def _new_future(self) -> "asyncio.Future[EngineInfo]":
        ready: asyncio.Future[EngineInfo] = self._loop.create_future()
        # Nobody may look: start() was cancelled, or the engine is on its way once more.
        ready.add_done_callback(lambda done: done.cancelled() or done.exception())
        return ready

    @property
    def is_up(self) -> bool:
        return self.failure is None and self.ready.done() and not self.ready.cancelled()

    @property
    def load(self) -> int:
        """Requests open: ours, or all that the engine has told of."""
        return max(len(self.sinks), self.counters.running + self.counters.waiting)

    @property
    def total(self) -> EngineCounters:
        """With what was counted before the engine was started again."""
        return added([self._past, self.counters])

    def reopen(self) -> None:
        """The engine has failed and is being started again."""
        self._past = replace(self.total, **dict.fromkeys(GAUGES, 0))
        self.counters = EngineCounters()
        self.failure, self.ready = None, self._new_future()

    def open(self, requests: Sequence[Request], sink: Sink, may_move: bool) -> None:
        """`may_move`: to another engine, if this one dies before their first token."""
        for request in requests:
            self.sinks[request.id] = sink
            if may_move:
                self._silent[request.id] = request
            self._held[request.id] = request.tenant, len(request.prompt_ids)
            self._holdings.change(request.tenant, 1, len(request.prompt_ids))

    def deliver(self, delta: TokenDelta) -> None:
        """To its sink; news of a request that has already ended is dropped."""
        if self._silent:
            self._silent.pop(delta.request_id, None)
        if delta.finish is None:
            sink = self.sinks.get(delta.request_id)
        else:
            sink = self._close(delta.request_id)
        if sink is not None:
            sink(delta)

    def _close(self, request_id: int) -> Sink | None:
        sink = self.sinks.pop(request_id, None)
        if sink is not None:
            tenant, num_tokens = self._held.pop(request_id)
            self._holdings.change(tenant, -1, -num_tokens)
        return sink

    def take_silent(self) -> list[tuple[Request, Sink]]:
        """Requests that had no delta and may move: they are not this engine's any more."""
        silent, self._silent = self._silent, {}
        taken = [(request, self._close(request.id)) for request in silent.values()]
        return [(request, sink) for request, sink in taken if sink is not None]

    def end(self, ids: Iterable[int], finish: FinishReason, error: str | None = None) -> None:
        for one in ids:
            self.deliver(TokenDelta(request_id=one, finish=finish, error=error))

    def fail(self, message: str, error_type: type[BackendError]) -> None:
        """End everything, once; the first reason is the one that counts."""
        if self.failure is not None:
            return
        self.failure = message
        if not self.ready.done():
            self.ready.set_exception(error_type(message))
        self.end(list(self.sinks), FinishReason.ERROR, message)


class EngineClient:
    """Must be made inside the running event loop it will be used in.

    `capacity` bounds what may be open, one bound for all API servers that share the engines, as
    they share the table `routes`.
    """

    def __init__(
        self,
        engines: Sequence[str],
        socket_folder: str,
        *,
        client_id: int = 1,
        max_stats_len: int = 1000,
        capacity: Capacity | None = None,
        routes: Row | None = None,
        silence_limit_s: float = SILENCE_LIMIT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._client_id = client_id
        self._serial = itertools.count()
        self.capacity = Capacity() if capacity is None else capacity
        self._silence_limit_s = silence_limit_s
        self._clock = clock
        self._routes = routes
        self._router: Router | None = None
        self._info: EngineInfo | None = None
        self._links = [
            _EngineLink(
                engine,
                address(socket_folder, "client"),
                max_stats_len,
                self._loop,
                self.capacity.holdings,
            )
            for engine in engines
        ]

    async def start(self) -> EngineInfo:
        """Introduce ourselves and wait until every engine is built, however long that takes."""
        for link in self._links:
            link.listener = self._loop.create_task(self._listen(link))
            self._greet(link)
        infos = await asyncio.gather(*(asyncio.shield(link.ready) for link in self._links))
        self._info = infos[0]
        if len(infos) > 1:
            self._router = Router(infos[0].tokens_per_block, self._routes)
        return self.info

    def _greet(self, link: _EngineLink) -> None:
        hello = Hello(
            version=PROTOCOL_VERSION, client_id=self._client_id, address=link.receiver.address
        )
        link.sender.send(hello)

    @property
    def info(self) -> EngineInfo:
        """What the engines are; all are alike."""
        assert self._info is not None, "start() has not returned"
        return self._info

    @property
    def num_open(self) -> int:
        return sum(len(link.sinks) for link in self._links)

    @property
    def counters(self) -> EngineCounters:
        """The engines' latest counters, added up."""
        if len(self._links) == 1:
            return self._links[0].counters
        return added([link.total for link in self._links])

    def drain_iterations(self) -> list[IterationStats]:
        """Iterations since the last call; the oldest are lost beyond `max_stats_len`."""
        drained = [stats for link in self._links for stats in link.iterations]
        for link in self._links:
            link.iterations.clear()
        return drained

    @property
    def num_engines(self) -> int:
        return len(self._links)

    @property
    def num_up(self) -> int:
        return sum(link.is_up for link in self._links)

    def is_healthy(self) -> bool:
        """Some engine is up, and idle or heard from lately."""
        return any(link.is_up and self._is_heard(link) for link in self._links)

    def is_silent(self, index: int) -> bool:
        """That engine has something to do and says nothing, or has said that it cannot go on."""
        link = self._links[index]
        return link.failure is not None or (link.is_up and not self._is_heard(link))

    def _is_heard(self, link: _EngineLink) -> bool:
        return not link.sinks or self._clock() - link.last_heard < self._silence_limit_s

    def new_id(self) -> int:
        return request_id(self._client_id, next(self._serial))

    def submit(self, requests: Sequence[Request], sink: Sink) -> None:
        """Send requests that belong together (samples of one prompt) to one engine.

        `sink` is called in the loop with each of their deltas as it arrives, and must not raise.
        """
        self._submit(requests, sink, may_move=len(self._links) > 1)

    def _submit(self, requests: Sequence[Request], sink: Sink, may_move: bool) -> None:
        link = self._pick(requests)
        link.sender.send(Submit(requests=tuple(requests)))
        if not link.sinks:
            link.last_heard = self._clock()  # an idle engine need not have said anything
        link.open(requests, sink, may_move)

    def abort(self, ids: Iterable[int]) -> None:
        """End these requests now; unknown and ended ones are ignored."""
        wanted = set(ids)
        for link in self._links:
            mine = wanted & link.sinks.keys()
            if not mine:
                continue
            link.end(mine, FinishReason.ABORT)
            try:
                link.sender.send(Abort(request_ids=tuple(mine)))
            except ChannelFull as error:
                _log.warning("abort of %d requests: %s", len(mine), error)

    def engine_died(self, index: int, message: str, restarts: bool = False) -> None:
        """From any thread: engine `index` has ended by itself, and comes back if it `restarts`."""
        link = self._links[index]

        def fail() -> None:
            # What it has said before it ended is here, and may be why.
            while (last_words := link.receiver.receive_waiting()) is not None:
                self._handle(link, last_words)
            self._fail(link, message, WorkerDied)
            if restarts and self._info is not None:  # before the first start, that has failed
                link.reopen()
                if self._router is not None:
                    self._router.forget(index)
                self._greet(link)  # waits until the next process listens at the address

        try:
            self._loop.call_soon_threadsafe(fail)
        except RuntimeError:  # the loop is closed: nobody is left to be told
            _log.warning("%s", message)

    def _fail(self, link: _EngineLink, message: str, error_type: type[BackendError]) -> None:
        """The engine is gone: requests that had no token yet go to another one, the others end."""
        if link.failure is not None:
            return
        moving = link.take_silent()
        link.fail(message, error_type)
        for request, sink in moving:
            try:
                self._submit([request], sink, may_move=False)
            except PenstockError as error:
                what = f"{message}; no other engine takes the request: {error}"
                sink(TokenDelta(request_id=request.id, finish=FinishReason.ERROR, error=what))

    def end_all(self, reason: str) -> None:
        """End every open request with this error, and take no more."""
        for link in self._links:
            link.fail(reason, BackendError)

    async def close(self) -> None:
        """End every open request and let go of the sockets."""
        for link in self._links:
            link.fail("the engine is being shut down", WorkerDied)
            if link.listener is not None:
                link.listener.cancel()
        listeners = [link.listener for link in self._links if link.listener is not None]
        await asyncio.gather(*listeners, return_exceptions=True)
        for link in self._links:
            link.sender.close()
            link.receiver.close()

    def _pick(self, requests: Sequence[Request]) -> _EngineLink:
        up = {index: link for index, link in enumerate(self._links) if link.is_up}
        if not up:
            raise WorkerDied(self._links[0].failure or "the engine is not ready yet")
        num_tokens = sum(len(request.prompt_ids) for request in requests)
        self.capacity.check_request(self.info, len(requests), len(requests), num_tokens)
        self.capacity.check_room(self.info, len(up), requests[0].tenant, len(requests), num_tokens)
        if self._router is None:
            return self._links[0]
        loads = {index: link.load for index, link in up.items()}
        return up[self._router.pick(loads, requests[0])]

    async def _listen(self, link: _EngineLink) -> None:
        try:
            while True:
                self._handle(link, await link.receiver.receive())
                # Tokens come before new requests, so a few messages are taken at once; but those
                # who were woken must run, too.
                for _ in range(_MAX_AT_ONCE - 1):
                    if (message := link.receiver.receive_waiting()) is None:
                        break
                    self._handle(link, message)
                await asyncio.sleep(0)
        except Exception as error:
            _log.exception("the engine's messages cannot be read")
            link.fail(f"the engine's messages cannot be read: {error}", BackendError)

    def _handle(self, link: _EngineLink, message: Ready | Deltas | Stats | Fatal) -> None:
        link.last_heard = self._clock()
        match message:
            case Deltas(deltas=deltas):
                for delta in deltas:
                    link.deliver(delta)
            case Stats(counters=counters, iterations=iterations):
                link.counters = counters
                link.iterations.extend(iterations)
            case Ready(info=info):
                if not link.ready.done():
                    link.ready.set_result(info)
            case Fatal(message=reason):
                self._fail(link, reason, BackendError)
