"""`HttpServer`: uvicorn's server with our protocol (`http.HttpProtocol`), and how it stops.

After a first signal new requests are sent away (`request_guard`) and running ones may finish; the
port stays open meanwhile, so that a balancer hears it from us. After `shutdown_timeout` or a second
signal what still runs is ended, each with an error of its own. Whether it is leaving is known to
others by its `Drain`.
"""

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from socket import socket
from types import FrameType
from typing import Literal

import uvicorn
from starlette.types import ASGIApp

from penstock import log
from penstock.config.http import HttpConfig
from penstock.server.connections import Connections
from penstock.server.drain import Drain
from penstock.server.http import HttpProtocol
from penstock.server.signals import take_signals

BACKLOG = 8192  # connections that came all at once and wait to be accepted
_POLL_S = 0.05
_FLUSH_S = 2.0  # to write the last words of requests that were ended
_log = log.get(__name__)


def _nothing() -> None:
    pass


class HttpServer(uvicorn.Server):
    """`on_started`, when it accepts connections; `on_begin`, when it begins to leave; `is_last`,
    whether it may go, having nothing left to do; `end_requests`, to end those that run, with an
    error.
    """

    def __init__(
        self,
        app: ASGIApp,
        config: HttpConfig,
        drain: Drain,
        lifespan: Literal["on", "off"] = "off",
        log_level: str = "warning",
        timeout_s: float | None = None,
    ) -> None:
        self.drain = drain
        self.connections = Connections(config)
        self.on_started: Callable[[], None] = _nothing
        self.on_begin: Callable[[], None] = _nothing
        self.is_last: Callable[[], bool] = lambda: True
        self.end_requests: Callable[[], None] = _nothing
        self._timeout_s = config.shutdown_timeout if timeout_s is None else timeout_s
        super().__init__(
            uvicorn.Config(
                app,
                lifespan=lifespan,
                loop="uvloop",
                http=partial(HttpProtocol, self.connections),  # type: ignore[arg-type]
                ws="none",
                log_config=None,
                log_level=log_level,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=BACKLOG,
            )
        )

    @property
    def num_running(self) -> int:
        """HTTP requests that have begun and not ended."""
        return len(self.server_state.tasks)

    def leave(self, at_once: bool = False) -> None:
        if at_once:
            self.drain.hurry()
        self.drain.begin()
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.leave(at_once=self.drain.is_begun)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:  # type: ignore[override]
        """As uvicorn's, with SIGHUP, and none is raised again in the end."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = take_signals(self.handle_exit)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def startup(self, sockets: list[socket] | None = None) -> None:
        await super().startup(sockets)
        if not self.should_exit:
            self.on_started()

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        self.leave()
        self.on_begin()
        self.connections.close_after_responses()
        await self._until_idle()
        if self.num_running or not self.is_last():
            self.end_requests()
            self.connections.end_requests()
            await self._until(lambda: not self.num_running and self.is_last(), _FLUSH_S)
        for server in self.servers:
            server.close()
        for one in sockets or ():
            one.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        await self._until(lambda: not (self.connections or self.num_running), _FLUSH_S)
        self.connections.abort()
        await self._until(lambda: not self.num_running, _FLUSH_S)
        await self.lifespan.shutdown()

    async def _until_idle(self) -> None:
        if self.num_running:
            _log.info(
                "stopping: %d requests may run on for %g s; another signal ends them at once",
                self.num_running,
                self._timeout_s,
            )
        await self._until(
            lambda: self.drain.is_urgent or (not self.num_running and self.is_last()),
            self._timeout_s,
        )

    async def _until(self, is_done: Callable[[], bool], limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while not is_done() and time.monotonic() < deadline:
            await self.on_tick(0)  # responses still say what time it is
            await asyncio.sleep(_POLL_S)
