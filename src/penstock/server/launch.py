"""Serves: bind, start the engine, say what was chosen, run until asked to stop, stop in order.

The port refuses connections until the engine is ready. The process ends with a code other than 0
when the engine could not start, died or hangs, so that a supervisor notices.
"""

import asyncio
import gc
import signal
import socket
import sys
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock import log
from penstock.config.schema import EngineConfig
from penstock.errors import ConfigError, PenstockError
from penstock.frontend.client import EngineClient
from penstock.frontend.engine import EngineHandle
from penstock.frontend.start import start_pipeline, stop_pipeline
from penstock.server.app import build_app
from penstock.server.http import BoundedHttp
from penstock.server.report import startup_report
from penstock.server.state import model_name

_DRAIN_S = 5  # running requests may finish for this long after a signal
_POLL_S = 0.2
_BACKLOG = 2048
_STUCK_LIMIT_S = 240.0  # unhealthy for so long, and the process gives up
_log = log.get(__name__)
T = TypeVar("T")


def serve(config: EngineConfig) -> int:
    """Run the server until a signal; the exit code of the process."""
    log.setup("http", config.log_level)
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


class _Server:
    """The ASGI application whose lifespan is the engine's."""

    def __init__(self, config: EngineConfig, listener: socket.socket) -> None:
        self.exit_code = 1  # until it has started
        self.uvicorn = uvicorn.Server(
            uvicorn.Config(
                self,
                lifespan="on",
                loop="uvloop",
                http=BoundedHttp,
                ws="none",
                log_config=None,
                log_level="info",  # its line about a complete start-up is always wanted
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=_BACKLOG,
                timeout_graceful_shutdown=_DRAIN_S,
            )
        )
        self._config = config
        self._listener = listener
        self._begun = time.monotonic()
        self._app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        else:
            assert self._app is not None, "connections come after start-up"
            await self._app(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        try:
            pipeline, engine = await self._until_exit(start_pipeline(self._config))
        except PenstockError as error:
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        end = {"type": "lifespan.shutdown.complete"}
        watch = asyncio.create_task(self._watch(pipeline.client, engine))
        try:
            self._app = build_app(pipeline, self._config)
            host, port = self._listener.getsockname()[:2]
            name, has_key = model_name(self._config), self._config.api_key is not None
            waited_s = time.monotonic() - self._begun
            report = startup_report(pipeline.client.info, waited_s, name, host, port, has_key)
            print(report, file=sys.stderr, flush=True)
            gc.collect()
            gc.freeze()  # what start-up made stays; later collections need not look at it
            # Here and not left to uvloop, which does not notice when somebody else was faster.
            self._listener.listen(_BACKLOG)
            self.exit_code = 0
            await send({"type": "lifespan.startup.complete"})
            await receive()
        except OSError as error:
            said = f"cannot listen on port {port}: {error.strerror or error}"
            end = {"type": "lifespan.startup.failed", "message": said}
        finally:
            watch.cancel()
            await stop_pipeline(pipeline, engine)
        await send(end)

    async def _until_exit(self, starting: Coroutine[Any, Any, T]) -> T:
        """Loading a model takes minutes; a signal meanwhile ends it."""
        task = asyncio.ensure_future(starting)
        try:
            while not task.done():
                await asyncio.wait((task,), timeout=_POLL_S)
                if self.uvicorn.should_exit and not task.done():
                    raise PenstockError("stopped by a signal while the engine was starting")
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        return task.result()

    async def _watch(self, client: EngineClient, engine: EngineHandle) -> None:
        """Ends the server when the engine has died or hangs: a supervisor starts it anew."""
        last_healthy = time.monotonic()
        while engine.is_alive and time.monotonic() - last_healthy < _STUCK_LIMIT_S:
            await asyncio.sleep(_POLL_S)
            if client.is_healthy():
                last_healthy = time.monotonic()
        _log.error("the engine %s; stopping", "hangs" if engine.is_alive else "has ended")
        self.exit_code = 1
        self.uvicorn.should_exit = True
