"""The first front end: its server, whose lifespan is the engine's. Stops in order.

Imported while the engine process is starting (`launch`).
"""

import asyncio
import gc
import os
import socket
import sys
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Literal, TypeVar

import uvicorn
from msgspec.structs import replace
from starlette.applications import Starlette
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock import log
from penstock.config.schema import EngineConfig
from penstock.errors import PenstockError
from penstock.frontend.engine import EngineHandle
from penstock.frontend.pipeline import GenerationPipeline
from penstock.frontend.start import start_engine, stop_pipeline
from penstock.ipc.messages import EngineInfo
from penstock.server.app import build_app
from penstock.server.board import Board
from penstock.server.frontends import FurtherFrontEnds, choose_num_frontends
from penstock.server.http import StreamingHttp
from penstock.server.report import startup_report
from penstock.server.state import model_name

POLL_S = 0.2
_DRAIN_S = 5  # running requests may finish for this long after a signal
_BACKLOG = 8192  # connections that came all at once and wait to be accepted
_STUCK_LIMIT_S = 240.0  # unhealthy for so long, and the process gives up
_log = log.get(__name__)
T = TypeVar("T")


def choice_of(num_frontends: int, reason: str) -> tuple[str, str, str]:
    return "num_postprocess_workers", str(num_frontends), reason


def uvicorn_config(app: ASGIApp, lifespan: Literal["on", "off"], log_level: str) -> uvicorn.Config:
    """The same for every front end."""
    return uvicorn.Config(
        app,
        lifespan=lifespan,
        loop="uvloop",
        http=StreamingHttp,
        ws="none",
        log_config=None,
        log_level=log_level,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=_BACKLOG,
        timeout_graceful_shutdown=_DRAIN_S,
    )


class Patience:
    """Ends when the engine has been unhealthy for too long."""

    def __init__(self) -> None:
        self._last_healthy = time.monotonic()

    def is_lost(self, is_healthy: bool) -> bool:
        if is_healthy:
            self._last_healthy = time.monotonic()
        return time.monotonic() - self._last_healthy > _STUCK_LIMIT_S


class FirstFrontEnd:
    """The ASGI application whose lifespan is the engine's, and the server around it.

    `folder` is the tokenizer's. `leaving` is set by a signal that came before the server hears of
    them. `begun_at`: when the user began to wait.
    """

    def __init__(
        self,
        config: EngineConfig,
        listener: socket.socket,
        folder: Path | None,
        engine: EngineHandle,
        leaving: threading.Event,
        begun_at: float,
    ) -> None:
        self.exit_code = 1  # until it has started
        # uvicorn's line about a complete start-up is always wanted
        self.uvicorn = uvicorn.Server(uvicorn_config(self, lifespan="on", log_level="info"))
        self._config = config
        self._listener = listener
        self._folder = folder
        self._engine = engine
        self._leaving = leaving
        self._begun_at = begun_at
        self._app: Starlette | None = None

    def run(self) -> int:
        """Until a signal; the exit code of the process."""
        try:
            self.uvicorn.run(sockets=[self._listener])
        except SystemExit:  # how uvicorn says that the application did not start
            pass
        return self.exit_code

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        else:
            assert self._app is not None, "connections come after start-up"
            await self._app(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        config, folder, engine = self._config, self._folder, self._engine
        num_frontends, reason = choose_num_frontends(config)
        others = None
        try:
            board = Board.create(os.path.join(engine.socket_folder, "board"), num_frontends)
            others = FurtherFrontEnds(
                config, folder, self._listener, engine, board, reason, on_failure=self._fail
            )
            pipeline = await self._until_exit(
                start_engine(config, folder, engine, board.open_elsewhere, board.tell_open)
            )
        except BaseException as error:
            if others is not None:
                await others.stop()
            if not isinstance(error, PenstockError):
                raise
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        end = {"type": "lifespan.shutdown.complete"}
        watch = asyncio.create_task(self._watch(pipeline, engine, board, others))
        try:
            choice = choice_of(num_frontends, reason)
            self._app = build_app(pipeline, config, board, [choice])
            self._say_ready(pipeline.client.info, choice)
            gc.collect()
            gc.freeze()  # what start-up made stays; later collections need not look at it
            # Here and not left to uvloop, which does not notice when somebody else was faster.
            self._listener.listen(_BACKLOG)
            if not self.uvicorn.should_exit:
                self.exit_code = 0
            await send({"type": "lifespan.startup.complete"})
            await receive()
        except OSError as error:
            port = self._listener.getsockname()[1]
            said = f"cannot listen on port {port}: {error.strerror or error}"
            end = {"type": "lifespan.startup.failed", "message": said}
        finally:
            watch.cancel()
            await others.stop()
            await stop_pipeline(pipeline, engine)
        await send(end)

    def _say_ready(self, info: EngineInfo, choice: tuple[str, str, str]) -> None:
        host, port = self._listener.getsockname()[:2]
        name, has_key = model_name(self._config), self._config.api_key is not None
        waited_s = time.time() - self._begun_at
        info = replace(info, choices=(*info.choices, choice))
        report = startup_report(info, waited_s, name, host, port, has_key)
        print(report, file=sys.stderr, flush=True)

    async def _until_exit(self, starting: Coroutine[Any, Any, T]) -> T:
        """Loading a model takes minutes; a signal meanwhile ends it."""
        task = asyncio.ensure_future(starting)
        try:
            while not task.done():
                await asyncio.wait((task,), timeout=POLL_S)
                if self._leaving.is_set():
                    self.uvicorn.should_exit = True
                if self.uvicorn.should_exit:
                    # Another front end may have heard first why the engine cannot start.
                    await asyncio.wait((task,), timeout=POLL_S)
                if self.uvicorn.should_exit and not task.done():
                    raise PenstockError("stopped while the engine was starting")
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        return task.result()

    async def _watch(
        self,
        pipeline: GenerationPipeline,
        engine: EngineHandle,
        board: Board,
        others: FurtherFrontEnds,
    ) -> None:
        """Ends the server when the engine has died or hangs: a supervisor starts it anew."""
        patience = Patience()
        while not self.uvicorn.should_exit:
            await asyncio.sleep(POLL_S)
            if self._app is not None:
                self._app.state.server.metrics.iterations.refresh()
            if not engine.is_alive:
                _log.error("the engine has ended; stopping")
                board.tell_engine_ended()
                self._fail()
            elif patience.is_lost(pipeline.client.is_healthy()):
                _log.error("the engine hangs; stopping")
                self._fail()
        others.ask_to_leave()

    def _fail(self) -> None:
        self.exit_code = 1
        self.uvicorn.should_exit = True
