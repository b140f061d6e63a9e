"""A further front end: `python -m penstock.server.frontend_process`, started by `frontends`.

Joins an engine that the first front end has started and accepts from the same socket. Leaves when
its parent closes its stdin; its exit code says whether to start it again.
"""

import asyncio
import gc
import socket
import sys
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
import uvloop

from penstock import log
from penstock.config.schema import EngineConfig
from penstock.errors import PenstockError
from penstock.frontend.pipeline import GenerationPipeline
from penstock.frontend.start import join_engine
from penstock.ipc.process import on_parent_exit, read_task
from penstock.server.app import build_app
from penstock.server.board import Board
from penstock.server.frontends import FAILED
from penstock.server.lifespan import POLL_S, Patience, choice_of, uvicorn_config

_log = log.get(__name__)


async def run(task: dict[str, Any]) -> int:
    config = EngineConfig.model_validate({**task["config"], "api_key": task["api_key"]})
    log.setup(f"http {task['index']}", config.log_level)
    board = Board(task["board"], task["num_frontends"], task["index"])
    listener = socket.socket(fileno=task["listener"])
    loop, parent_left = asyncio.get_running_loop(), asyncio.Event()
    on_parent_exit(partial(_tell, loop, parent_left))
    leaving = asyncio.create_task(parent_left.wait())
    joining = asyncio.create_task(_join(config, task, board, listener))
    await asyncio.wait((joining, leaving), return_when=asyncio.FIRST_COMPLETED)
    if not joining.done():
        return 0
    try:
        pipeline = joining.result()
    except PenstockError as error:
        _log.debug("%s", error)  # the first front end was told the same
        return FAILED
    choice = choice_of(task["num_frontends"], task["reason"])
    app = build_app(pipeline, config, board, [choice])
    server = uvicorn.Server(uvicorn_config(app, lifespan="off", log_level="warning"))
    gc.collect()
    gc.freeze()
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    is_well = await _watch(pipeline, board, serving, leaving)
    server.should_exit = True
    await serving
    await pipeline.client.close()
    return 0 if is_well else FAILED


def _tell(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    loop.call_soon_threadsafe(event.set)


async def _join(
    config: EngineConfig, task: dict[str, Any], board: Board, listener: socket.socket
) -> GenerationPipeline:
    """The first front end begins to listen; whoever listens before it could hide a taken port."""
    folder = None if task["tokenizer_folder"] is None else Path(task["tokenizer_folder"])
    pipeline = await join_engine(
        config, folder, task["engine"], task["client_id"], board.open_elsewhere, board.tell_open
    )
    while not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        await asyncio.sleep(POLL_S / 4)
    return pipeline


async def _watch(
    pipeline: GenerationPipeline,
    board: Board,
    serving: "asyncio.Task[None]",
    leaving: "asyncio.Task[Any]",
) -> bool:
    """Until it is time to leave; False when the engine hangs."""
    patience = Patience()
    while not (serving.done() or leaving.done()):
        await asyncio.wait((serving, leaving), timeout=POLL_S)
        if board.has_engine_ended:
            pipeline.client.engine_died(0, "the engine process ended; its log says why")
            await leaving
            return True
        if patience.is_lost(pipeline.client.is_healthy()):
            return False
    return True


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        sys.exit(runner.run(run(read_task())))
