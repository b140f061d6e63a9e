"""The engine process: reads its task, builds an `Engine`, runs it, reports failure.

Started as `python -m penstock.engine_process` with a task on stdin; leaves when its parent closes
that pipe.
"""

import gc
import os
import sys
import threading
import time
from typing import Any

from penstock import log
from penstock.config.launch import find_place
from penstock.config.schema import EngineConfig
from penstock.engine.engine import Engine
from penstock.engine.mailbox import Mailbox
from penstock.errors import PenstockError
from penstock.ipc.address import folder_of
from penstock.ipc.messages import Fatal
from penstock.ipc.process import on_parent_exit, read_task
from penstock.runtime.compile_workers import stand_by
from penstock.runtime.timeline import Timeline

_log = log.get(__name__)
_EXIT_GRACE_S = 15.0


def main() -> None:
    task: dict[str, Any] = read_task()
    config = EngineConfig.model_validate(task["config"])
    is_replica = config.data_parallel_size > 1
    log.setup(f"engine {task['replica']}" if is_replica else "engine", config.log_level)
    forked = stand_by(config)
    timeline = Timeline(task["begun_at"])
    timeline.phases.append(("read settings", task["spawned_at"] - task["begun_at"]))
    timeline.phases.append(("start process and import torch", time.time() - task["spawned_at"]))
    mailbox = Mailbox(task["address"])
    stopping = threading.Event()
    engine: Engine | None = None

    def leave() -> None:
        stopping.set()
        if engine is not None:
            engine.loop.stop()
        time.sleep(_EXIT_GRACE_S)
        os._exit(1)  # stuck in a step: the parent is gone or has lost its patience

    on_parent_exit(leave)
    try:
        place = find_place(config.launcher)
        engine = Engine(config, mailbox, folder_of(task["address"]), timeline, forked, place)
    except Exception as error:
        if not isinstance(error, PenstockError):
            _log.exception("the engine did not start")
        mailbox.receive(timeout_ms=10_000)  # until somebody is there to be told
        mailbox.broadcast(Fatal(message=str(error) or type(error).__name__))
        sys.exit(1)
    _log.debug("ready: %s", timeline)
    gc.collect()
    gc.freeze()
    if not stopping.is_set():
        engine.run()


if __name__ == "__main__":
    main()
