"""Shows how a load goes: a bar on a terminal, a line now and then elsewhere, both on stderr."""

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from penstock.bench.load import Tally

_BAR_PERIOD_S, _LINE_PERIOD_S = 0.5, 10.0


@contextlib.asynccontextmanager
async def shown(is_wanted: bool) -> AsyncIterator[Callable[[Tally], None]]:
    """Yields the `watch` of `send_all`."""
    tasks: list[asyncio.Task[None]] = []

    def watch(tally: Tally) -> None:
        if is_wanted:
            show = _bar if sys.stderr.isatty() else _lines
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
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        task, speed = bar.add_task("", total=tally.num_requests), _Speed(tally)
        try:
            while True:
                await asyncio.sleep(_BAR_PERIOD_S)
                bar.update(task, completed=tally.num_ended, description=speed.words())
        finally:
            bar.update(task, completed=tally.num_ended, description=speed.words())


async def _lines(tally: Tally) -> None:
    speed = _Speed(tally)
    while True:
        await asyncio.sleep(_LINE_PERIOD_S)
        done = f"{tally.num_ended}/{tally.num_requests} requests"
        print(f"{done}, {speed.words()}", file=sys.stderr, flush=True)
