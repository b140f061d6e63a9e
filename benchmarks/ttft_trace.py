"""`Trace`: when a request passed which stage, in all processes; and an engine that writes its own.

Used by `ttft_breakdown.py`. Run as a module it is the scripted engine, traced.
"""

import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import scripted_engine

from penstock.ipc.process import on_parent_exit, read_task

# In the order of one request. A stage ends at its moment and began at the one before.
STAGES = {
    "sent": "",
    "read": "client -> API server's event loop",
    "routed": "parse the head, middleware, routing",
    "parsed": "read, decode and check the body",
    "rendered": "render the chat template (its process)",
    "tokenized": "tokenize",
    "submitted": "check limits, send Submit",
    "admitted": "Submit -> engine",
    "stepped": "scripted engine, send Deltas",
    "delivered": "Deltas -> API server's event loop",
    "written": "detokenize, event, write",
    "received": "API server -> client",
}
COLUMN = {name: index for index, name in enumerate(STAGES)}
_ROW_BYTES = 8 * len(STAGES)
_MAX_ROWS = 1 << 16


class Trace:
    """Moments of every request in a file that all processes map: a row each, 0 where none was."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._cells = memoryview(mmap.mmap(file.fileno(), 0)).cast("d")
        self._row = -1

    @staticmethod
    def create(path: Path) -> "Trace":
        path.write_bytes(bytes(_ROW_BYTES * _MAX_ROWS))
        return Trace(path)

    def next(self) -> None:
        self._row += 1

    def mark(self, name: str) -> None:
        """Now, unless it has been already: of several events the first counts."""
        at = self._row * len(STAGES) + COLUMN[name]
        if self._row >= 0 and not self._cells[at]:
            self._cells[at] = time.monotonic()

    def row(self) -> list[float]:
        begin = self._row * len(STAGES)
        return list(self._cells[begin : begin + len(STAGES)])


def wrap(owner: Any, name: str, before: Callable[..., None], after: Callable[..., None]) -> None:
    act = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        before(*args)
        result = act(*args, **kwargs)
        after(*args)
        return result

    setattr(owner, name, wrapped)


def wrap_async(owner: Any, name: str, before: str | None, after: str, trace: Trace) -> None:
    act = getattr(owner, name)

    async def wrapped(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            trace.mark(before)
        result = await act(*args, **kwargs)
        trace.mark(after)
        return result

    setattr(owner, name, wrapped)


def nothing(*_: Any) -> None:
    pass


def run_engine() -> None:
    """In the engine process."""
    task = read_task()
    on_parent_exit(lambda: os._exit(0))
    config = task["config"]
    trace = Trace(Path(config["model_kwargs"]["trace"]))

    def on_admit(*_: Any) -> None:
        trace.next()
        trace.mark("admitted")

    wrap(scripted_engine.ScriptedEngine, "_admit", on_admit, nothing)
    wrap(scripted_engine.ScriptedEngine, "_step", nothing, lambda *_: trace.mark("stepped"))
    scripted_engine.ScriptedEngine(
        task["address"], config["model_kwargs"], config["max_queued_requests"]
    ).run()


if __name__ == "__main__":
    run_engine()
