"""A further API server: `python -m penstock.server.api_server_process`, started by `api_servers`.

Joins an engine that the first API server has started and accepts from the same socket. Leaves when
its parent closes its stdin; its exit code says whether to start it again.
"""

import asyncio
import gc
import socket
import sys
from functools import partial
from pathlib import Path
from typing import Any

import uvloop
from starlette.applications import Starlette

from penstock import log
from penstock.config.schema import EngineConfig
from penstock.errors import BackendError, PenstockError
from penstock.frontend.capacity import Capacity
from penstock.frontend.pipeline import GenerationPipeline
from penstock.frontend.start import join_engine
from penstock.ipc.process import on_parent_exit, read_task
from penstock.ipc.shared import Row
from penstock.server.api_servers import FAILED
from penstock.server.app import build_app
from penstock.server.auth import capacity_of
from penstock.server.drain import Drain
from penstock.server.http_server import HttpServer
from penstock.server.lifespan import POLL_S, SHUTTING_DOWN, EngineWatchdog, setting_choice
from penstock.server.shared_state import SharedState
from penstock.server.tenants import Access

_LATE_S = 10.0
_log = log.get(__name__)


async def run(task: dict[str, Any]) -> int | str:
    """The exit code, or why it cannot start."""
    config = EngineConfig.model_validate(task["config"])
    access = Access.from_task(task["access"])
    log.setup(f"http {task['index']}", config.log_level)
    shared = SharedState(task["shared_state"], task["num_api_servers"], task["index"])
    listener = socket.socket(fileno=task["listener"])
    loop, parent_left = asyncio.get_running_loop(), asyncio.Event()
    on_parent_exit(partial(_tell, loop, parent_left))
    leaving = asyncio.create_task(parent_left.wait())
    capacity = capacity_of(access, config, shared.holdings)
    joining = asyncio.create_task(_join(config, task, capacity, shared.routes, listener))
    await asyncio.wait((joining, leaving), return_when=asyncio.FIRST_COMPLETED)
    if not joining.done():
        return 0
    try:
        pipeline = joining.result()
    except BackendError as error:
        _log.debug("%s", error)  # the engine has told the first API server the same
        return FAILED
    except Exception as error:
        if not isinstance(error, PenstockError):
            _log.error("a bug in Penstock", exc_info=error)
        return f"it cannot start: {error}"
    drain = Drain()
    choice = setting_choice(task["num_api_servers"], task["reason"])
    app = build_app(pipeline, config, shared, [choice], drain, access)
    server = _server(app, pipeline, config, drain)
    app.state.batches.start()
    gc.collect()
    gc.freeze()
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    is_well = await _watch(pipeline, shared, server, serving, leaving)
    await serving
    await app.state.batches.aclose()
    await app.state.responses.aclose()
    await pipeline.aclose()
    return 0 if is_well else FAILED


def _server(
    app: Starlette, pipeline: GenerationPipeline, config: EngineConfig, drain: Drain
) -> HttpServer:
    # The first API server says when time is over (`SharedState`); else this one ends by itself.
    timeout_s = config.http_config.shutdown_timeout + _LATE_S
    server = HttpServer(app, config.http_config, drain, timeout_s=timeout_s)
    server.end_requests = partial(pipeline.client.end_all, SHUTTING_DOWN)
    return server


def _tell(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    loop.call_soon_threadsafe(event.set)


async def _join(
    config: EngineConfig,
    task: dict[str, Any],
    capacity: Capacity,
    routes: Row,
    listener: socket.socket,
) -> GenerationPipeline:
    """The first API server begins to listen; whoever listens before it could hide a taken port."""
    folder = None if task["tokenizer_folder"] is None else Path(task["tokenizer_folder"])
    pipeline = await join_engine(
        config, folder, task["engines"], task["client_id"], capacity, routes
    )
    while not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        await asyncio.sleep(POLL_S / 4)
    return pipeline


async def _watch(
    pipeline: GenerationPipeline,
    shared: SharedState,
    server: HttpServer,
    serving: "asyncio.Task[None]",
    leaving: "asyncio.Task[Any]",
) -> bool:
    """Until it has left; False when the engine hangs."""
    client, watchdog, is_over = pipeline.client, EngineWatchdog(), False
    restarts = client.num_engines > 1
    known = [shared.num_ends(index) if restarts else 0 for index in range(client.num_engines)]
    while not serving.done():
        waited_for = (serving,) if leaving.done() else (serving, leaving)
        await asyncio.wait(waited_for, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
        if leaving.done():
            server.leave(at_once=shared.must_end_requests)
        for index, number in enumerate(known):
            if shared.num_ends(index) > number:
                known[index], is_over = shared.num_ends(index), not restarts
                client.engine_died(index, "the engine process ended; its log says why", restarts)
        if not is_over and watchdog.is_hung(client.is_healthy()):
            server.leave(at_once=True)
            return False
    return True


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        sys.exit(runner.run(run(read_task())))
