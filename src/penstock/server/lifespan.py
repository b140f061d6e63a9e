"""The first API server, whose lifespan is the engine's. Stops in order.

Imported while the engine process is starting (`launch`).
"""

import asyncio
import gc
import logging
import os
import sys
import time
from collections.abc import Coroutine
from functools import partial
from typing import Any, TypeVar

from msgspec.structs import replace
from starlette.applications import Starlette
from starlette.types import Receive, Scope, Send

from penstock import log
from penstock.errors import PenstockError
from penstock.frontend.engine_handle import EngineHandle
from penstock.frontend.pipeline import GenerationPipeline
from penstock.frontend.start import start_engine, stop_pipeline
from penstock.server.api_servers import ApiServerProcesses, choose_num_api_servers
from penstock.server.app import build_app
from penstock.server.auth import capacity_of
from penstock.server.drain import Drain
from penstock.server.http_server import BACKLOG, HttpServer
from penstock.server.launch_state import LaunchState
from penstock.server.report import base_url, full_report, ready_report
from penstock.server.shared_state import SharedState
from penstock.server.state import model_name
from penstock.types.setting_choice import SettingChoice

POLL_S = 0.2
SHUTTING_DOWN = "the server is shutting down"
_STUCK_LIMIT_S = 240.0  # unhealthy for so long, and the process gives up
_log = log.get(__name__)
T = TypeVar("T")


def setting_choice(num_api_servers: int, reason: str) -> SettingChoice:
    return SettingChoice(name="num_postprocess_workers", value=str(num_api_servers), reason=reason)


class EngineWatchdog:
    """Whether the engine has been unhealthy for too long."""

    def __init__(self) -> None:
        self._last_healthy = time.monotonic()

    def is_hung(self, is_healthy: bool) -> bool:
        if is_healthy:
            self._last_healthy = time.monotonic()
        return time.monotonic() - self._last_healthy > _STUCK_LIMIT_S


class FirstApiServer:
    """The ASGI application whose lifespan is the engine's, and the server around it.

    `exit_code` is that of the process.
    """

    def __init__(self, launched: LaunchState) -> None:
        self.exit_code = 1  # until it has started
        # uvicorn's line about a complete start-up is always wanted
        self.uvicorn = HttpServer(
            self, launched.config.http_config, Drain(), lifespan="on", log_level="info"
        )
        self._launched = launched
        self._app: Starlette | None = None

    def run(self) -> int:
        """Until a signal; the exit code of the process."""
        try:
            self.uvicorn.run(sockets=[self._launched.listener])
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
        launched = self._launched
        config, engine, access = launched.config, launched.engine, launched.access
        num_api_servers, reason = choose_num_api_servers(config)
        others = None
        try:
            path = os.path.join(engine.socket_folder, "shared")
            shared = SharedState.create(path, num_api_servers, len(access.tenants))
            others = ApiServerProcesses(launched, shared, reason, on_failure=self._fail)
            capacity = capacity_of(access, config, shared.holdings)
            folder = launched.tokenizer_folder
            engine.watch(lambda index, _: shared.tell_engine_ended(index))
            starting = start_engine(config, folder, engine, capacity, shared.routes)
            pipeline = await self._until_exit(starting)
        except BaseException as error:
            if others is not None:
                await others.stop()
            if not isinstance(error, PenstockError):
                raise
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        end = {"type": "lifespan.shutdown.complete"}
        watch = asyncio.create_task(self._watch(pipeline, engine))
        try:
            choice = setting_choice(num_api_servers, reason)
            self._app = build_app(pipeline, config, shared, [choice], self.uvicorn.drain, access)
            self.uvicorn.on_begin = others.ask_to_leave
            self.uvicorn.is_last = lambda: others.are_gone
            self.uvicorn.end_requests = partial(self._end_requests, pipeline, shared)
            self.uvicorn.on_started = partial(self._say_ready, pipeline, choice)
            self._app.state.batches.start()
            gc.collect()
            gc.freeze()  # what start-up made stays; later collections need not look at it
            # Here and not left to uvloop, which does not notice when somebody else was faster.
            launched.listener.listen(BACKLOG)
            if not self.uvicorn.should_exit:
                self.exit_code = 0
            await send({"type": "lifespan.startup.complete"})
            await receive()
        except OSError as error:
            port = launched.listener.getsockname()[1]
            said = f"cannot listen on port {port}: {error.strerror or error}"
            end = {"type": "lifespan.startup.failed", "message": said}
        finally:
            watch.cancel()
            await others.stop()
            if self._app is not None:
                await self._app.state.batches.aclose()
                await self._app.state.responses.aclose()
            await stop_pipeline(pipeline, engine)
        await send(end)

    def _say_ready(self, pipeline: GenerationPipeline, choice: SettingChoice) -> None:
        launched = self._launched
        url = base_url(*launched.listener.getsockname()[:2])
        name, has_key = model_name(launched.config), launched.access.has_keys
        waited_s = time.time() - launched.begun_at
        if _log.isEnabledFor(logging.DEBUG):
            info = pipeline.client.info
            info = replace(info, choices=(*info.choices, choice))
            print(full_report(info, waited_s), file=sys.stderr)
        report = ready_report(pipeline, waited_s, name, url, has_key)
        print(report, file=sys.stderr, flush=True)

    async def _until_exit(self, starting: Coroutine[Any, Any, T]) -> T:
        """Loading a model takes minutes; a signal meanwhile ends it."""
        task = asyncio.ensure_future(starting)
        try:
            while not task.done():
                await asyncio.wait((task,), timeout=POLL_S)
                if self._launched.leaving.is_set():
                    self.uvicorn.leave()
                if self.uvicorn.should_exit:
                    # Another API server may have heard first why the engine cannot start.
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
    ) -> None:
        """Ends the server when the engine has died or hangs: a supervisor starts it anew. Of
        several engines one that hangs is killed, and then started again as one that died."""
        client = pipeline.client
        watchdogs = [EngineWatchdog() for _ in engine.addresses]
        has_failed = False
        while not has_failed:
            await asyncio.sleep(POLL_S)
            if self._app is not None:
                self._app.state.server.metrics.iterations.refresh()
            if not engine.is_alive:
                _log.error("the engine has ended; stopping")
                has_failed = True
                self._fail()
                continue
            for index, watchdog in enumerate(watchdogs):
                if not watchdog.is_hung(not client.is_silent(index)):
                    continue
                if engine.restarts:
                    _log.error("engine %d hangs and is killed", index)
                    watchdogs[index] = EngineWatchdog()
                    engine.kill(index)
                else:
                    _log.error("the engine hangs; stopping")
                    has_failed = True
                    self._fail(at_once=True)

    def _end_requests(self, pipeline: GenerationPipeline, shared: SharedState) -> None:
        """Of all API servers."""
        num_left = self.uvicorn.num_running + shared.holdings.num_open_elsewhere()
        why = "a second signal" if self.uvicorn.drain.is_urgent else "shutdown_timeout"
        _log.warning("%d requests still run and are ended now (%s)", num_left, why)
        shared.tell_end_requests()
        pipeline.client.end_all(SHUTTING_DOWN)

    def _fail(self, at_once: bool = False) -> None:
        self.exit_code = 1
        self.uvicorn.leave(at_once)
