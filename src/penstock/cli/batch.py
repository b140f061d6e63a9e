"""`penstock batch`: the requests of a file through an engine of its own, or a running server.

Every result is written as a whole line when it is there, so an interrupted run leaves a file that
the next one goes on with. What the lines mean is the business of `server/batches`.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from penstock import log
from penstock.cli.api_key import api_key_of
from penstock.config.load import load_config
from penstock.config.schema import EngineConfig
from penstock.errors import BackendError, ConfigError, RequestError
from penstock.frontend.start import start_pipeline, stop_pipeline
from penstock.server.batches.endpoints import endpoints_app, in_process_client
from penstock.server.batches.lines import (
    BatchLine,
    LineLimits,
    ResultFile,
    check_lines,
    read_lines,
)
from penstock.server.batches.run_lines import Answer, Ask, ask_over, run_lines
from penstock.server.state import server_state
from penstock.types.tenant import ANONYMOUS

_LIMITS = LineLimits(max_line_bytes=1 << 30, max_values=1 << 27)  # the user's own file
_MAX_LINES = 1 << 30
_HTTP_CONCURRENCY = 32
_LINE_PERIOD_S = 10.0


@dataclass(frozen=True, slots=True)
class _Asker:
    ask: Ask
    concurrency: int


def run(args: argparse.Namespace) -> int:
    log.setup("batch", "WARNING")
    if (args.model is None) == (args.base_url is None):
        raise ConfigError("name a MODEL to start, or a running server with --base_url")
    config = None
    if args.base_url is None:
        config = load_config({"model": args.model}, args.config, args.set)
    elif args.config is not None or args.set:
        raise ConfigError("--config and --set are for an engine of its own, not with --base_url")
    num_lines = _check(args.input)
    errors_path = args.errors or args.output.with_suffix(f".errors{args.output.suffix}")
    if len({path.resolve() for path in (args.input, args.output, errors_path)}) < 3:
        raise ConfigError("--input, --output and --errors must be three different files")
    try:
        with (
            ResultFile(args.output) as results,
            ResultFile(errors_path, is_fresh=True) as errors,  # what failed is tried again
        ):
            uvloop.run(_run(args, config, num_lines, results, errors))
            num_ok, num_failed = len(results), len(errors)
    except (OSError, RequestError) as error:
        raise ConfigError(f"cannot write the results: {error}") from None
    if not num_failed:
        errors_path.unlink()
    said = f"; {num_failed} failed, see {errors_path}" if num_failed else ""
    print(f"{num_ok} of {num_lines} results in {args.output}{said}", file=sys.stderr)
    return 1 if num_failed else 0


def _check(path: Path) -> int:
    """How many requests there are; nothing is started for a file that has errors."""
    try:
        num_lines, errors = check_lines(path, _LIMITS, _MAX_LINES)
    except OSError as error:
        raise ConfigError(f"cannot read --input {path}: {error.strerror or error}") from None
    if errors:
        first = errors[0]
        more = f" (and {len(errors) - 1} more lines have errors)" if len(errors) > 1 else ""
        raise ConfigError(f"{path}, line {first.line}: {first.message}{more}")
    return num_lines


async def _run(
    args: argparse.Namespace,
    config: EngineConfig | None,
    num_lines: int,
    results: ResultFile,
    errors: ResultFile,
) -> None:
    lines = read_lines(args.input, _LIMITS)
    num_left = sum(one.custom_id not in results.done for one in read_lines(args.input, _LIMITS))
    if num_left == 0:
        return
    if num_left < num_lines:
        print(f"going on: {num_left} of {num_lines} requests are left", file=sys.stderr)
    opened = _server(args) if config is None else _engine(config)
    async with opened as asker:
        concurrency = min(args.concurrency or asker.concurrency, num_left)
        with _progress(num_lines, num_lines - num_left) as advance:
            await run_lines(lines, asker.ask, results, errors, concurrency, advance)


@asynccontextmanager
async def _server(args: argparse.Namespace) -> AsyncIterator[_Asker]:
    base_url = args.base_url.rstrip("/").removesuffix("/v1")
    key = api_key_of(args.api_key)
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    limits = httpx.Limits(max_connections=None)
    try:
        client = httpx.AsyncClient(base_url=base_url, headers=headers, timeout=None, limits=limits)
    except (httpx.InvalidURL, ValueError) as error:
        raise ConfigError(f"--base_url {args.base_url}: {error}") from None
    async with client:
        plain = ask_over(client, lambda body: None)

        async def ask(line: BatchLine) -> Answer:
            answer = await plain(line)
            if answer.status in (401, 403, 404):  # it would be the same for all others
                raise ConfigError(f"{base_url}{line.url} answers {answer.status}: {answer.body}")
            return answer

        yield _Asker(ask, _HTTP_CONCURRENCY)


@asynccontextmanager
async def _engine(config: EngineConfig) -> AsyncIterator[_Asker]:
    pipeline, handle = await start_pipeline(config)
    try:
        state = server_state(pipeline, config, None, (), has_key=False)
        async with in_process_client(endpoints_app(state), ANONYMOUS) as client:
            plain = ask_over(client, lambda body: None)

            async def ask(line: BatchLine) -> Answer:
                answer = await plain(line)
                if answer.status == 503 and not pipeline.client.is_healthy():
                    raise BackendError(answer.body["error"]["message"])
                return answer

            info = pipeline.client.info
            # As many wait as run, so that no row is empty between two of them.
            yield _Asker(ask, min(2 * info.max_batch_size, info.max_queued))
    finally:
        await asyncio.shield(stop_pipeline(pipeline, handle))


@contextmanager
def _progress(total: int, num_done: int) -> Iterator[Callable[[], None]]:
    """A bar on a terminal's stderr, elsewhere a line now and then."""
    console = Console(stderr=True)
    columns = TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    told_at = time.monotonic()
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total, completed=num_done)

        def advance() -> None:
            nonlocal num_done, told_at
            num_done += 1
            bar.advance(task)
            if not console.is_terminal and time.monotonic() - told_at > _LINE_PERIOD_S:
                told_at = time.monotonic()
                print(f"{num_done}/{total} requests", file=sys.stderr, flush=True)

        yield advance
