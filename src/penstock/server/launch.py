"""Serves: bind, start the engine, say what was chosen, run until asked to stop, stop in order.

The port refuses connections until the engine is ready. The process ends with a code other than 0
when the engine could not start, died or hangs, so that a supervisor notices. It is itself the first
front end, and starts the others (`frontends`).
"""

import asyncio
import gc
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Coroutine
from typing import Any, Literal, TypeVar

import uvicorn
from msgspec.structs import replace
from starlette.applications import Starlette
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock import log
from penstock.config.schema import EngineConfig
from penstock.errors import ConfigError, PenstockError
from penstock.frontend.engine import EngineHandle
from penstock.frontend.pipeline import GenerationPipeline
from penstock.frontend.start import start_engine, stop_pipeline, tokenizer_folder
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
_MAX_FILES = 1 << 20
_STUCK_LIMIT_S = 240.0  # unhealthy for so long, and the process gives up
_log = log.get(__name__)
T = TypeVar("T")


def serve(config: EngineConfig) -> int:
    """Run the server until a signal; the exit code of the process."""
    log.setup("http", config.log_level)
    allow_many_connections()
    try:
        listener = bind(config.host, config.port)
    except ConfigError as error:
        _log.error("%s", error)
        return 1
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # uvicorn raises it again after an orderly stop
    app = _Server(config, listener)
    try:
        app.uvicorn.run(sockets=[listener])
    except SystemExit:  # how uvicorn says that the application did not start
        pass
    return app.exit_code


def bind(host: str, port: int) -> socket.socket:
    """Take the port, without listening yet."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror or error}; "
            "choose others with --host and --port"
        ) from None
    listener.set_inheritable(False)
    return listener


def allow_many_connections() -> None:
    """Each is an open file; the limit a shell starts with is often 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (ValueError, OSError) as error:
            _log.warning("at most %d files may be open, about as many connections: %s", soft, error)


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


class _Server:
    """The ASGI application whose lifespan is the engine's."""

    def __init__(self, config: EngineConfig, listener: socket.socket) -> None:
        self.exit_code = 1  # until it has started
        # uvicorn's line about a complete start-up is always wanted
        self.uvicorn = uvicorn.Server(uvicorn_config(self, lifespan="on", log_level="info"))
        self._config = config
        self._listener = listener
        self._begun = time.monotonic()
        self._app: Starlette | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        else:
            assert self._app is not None, "connections come after start-up"
            await self._app(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        config = self._config
        num_frontends, reason = choose_num_frontends(config)
        others = None
        try:
            folder = await self._until_exit(asyncio.to_thread(tokenizer_folder, config))
            engine = EngineHandle()
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
        waited_s = time.monotonic() - self._begun
        info = replace(info, choices=(*info.choices, choice))
        report = startup_report(info, waited_s, name, host, port, has_key)
        print(report, file=sys.stderr, flush=True)

    async def _until_exit(self, starting: Coroutine[Any, Any, T]) -> T:
        """Loading a model takes minutes; a signal meanwhile ends it."""
        task = asyncio.ensure_future(starting)
        try:
            while not task.done():
                await asyncio.wait((task,), timeout=POLL_S)
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
