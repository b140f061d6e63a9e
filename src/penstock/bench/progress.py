"""Shows how a load goes: a bar on a terminal, a line now and then elsewhere, both on stderr.

Without `rich` there are lines on a terminal, too.
"""

import asyncio
import contextlib
import importlib.util
import sys
import time
from collections.abc import AsyncIterator, Callable

from penstock.bench.load import Tally

_BAR_PERIOD_S, _LINE_PERIOD_S = 0.5, 10.0


@contextlib.asynccontextmanager
async def shown(is_wanted: bool) -> AsyncIterator[Callable[[Tally], None]]:
    """Yields the `watch` of `send_all`."""
    tasks: list[asyncio.Task[None]] = []

    def watch(tally: Tally) -> None:
        if is_wanted:
            has_bar = sys.stderr.isatty() and importlib.util.find_spec("rich") is not None
            show = _bar if has_bar else _lines
            tasks.append(asyncio.create_task(show(tally)))

    try:
        yield watch
    finally:
        for task in tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


class _Speed:
    """Tokens per second since it was last asked."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._at, self._tokens = time.monotonic(), 0.0

    def words(self) -> str:
        now, tokens = time.monotonic(), self._tally.num_tokens
        rate = (tokens - self._tokens) / (now - self._at)
        self._at, self._tokens = now, tokens
        failed = f", {self._tally.num_failed} failed" if self._tally.num_failed else ""
        return f"{max(0.0, rate):,.0f} tok/s, {self._tally.num_running} running{failed}"


async def _bar(tally: Tally) -> None:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        task, speed = bar.add_task("", total=tally.num_requests), _Speed(tally)

        def update() -> None:
            total, done = tally.num_requests, tally.num_ended
            bar.update(task, total=total, completed=done, description=speed.words())

        try:
            while True:
                await asyncio.sleep(_BAR_PERIOD_S)
                update()
        finally:
            update()


async def _lines(tally: Tally) -> None:
    speed = _Speed(tally)
    while True:
        await asyncio.sleep(_LINE_PERIOD_S)
        of = "" if tally.num_requests is None else f"/{tally.num_requests}"
        done = f"{tally.num_ended}{of} requests"
        print(f"{done}, {speed.words()}", file=sys.stderr, flush=True)
