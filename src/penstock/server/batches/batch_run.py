"""`BatchRun`: one batch, from wherever it is to its end.

Its state is saved before and after everything that takes long, its results are on disk line by
line: whoever runs it again goes on from there. Which batches run is the business of `worker`.
"""

import asyncio
import importlib
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from penstock import log
from penstock.server.batches.endpoints import BATCH_PRIORITY, in_process_client, with_priority
from penstock.server.batches.folder import TenantFolder
from penstock.server.batches.lines import (
    BatchLine,
    LineLimits,
    ResultFile,
    check_lines,
    read_lines,
    unsent_line,
)
from penstock.server.batches.records import (
    BatchError,
    BatchErrors,
    BatchState,
    RequestCounts,
    result_file_id,
)
from penstock.server.batches.run_lines import Answer, Stopped, ask_over, run_lines
from penstock.types.tenant import Tenant

MAX_REQUESTS = 50_000  # in one batch
MAX_INTERRUPTIONS = 3
_WATCH_S = 0.25
_log = log.get(__name__)


@dataclass(frozen=True, slots=True)
class BatchHost:
    """The server that a batch runs on. `app`: the endpoints of its lines. `concurrency`: requests
    of all batches at once."""

    app: ASGIApp
    max_line_bytes: int
    max_values: int
    concurrency: Callable[[], int]
    is_leaving: Callable[[], bool]
    is_engine_well: Callable[[], bool]


class BatchRun:
    """`tenant`: whose it is, None where the server knows the key no more. `places`: shared with all
    other batches."""

    def __init__(
        self,
        folder: TenantFolder,
        state: BatchState,
        tenant: Tenant | None,
        host: BatchHost,
        places: asyncio.Semaphore,
    ) -> None:
        self._folder = folder
        self._state = state
        self._batch = state.batch
        self._tenant = tenant
        self._host = host
        self._places = places
        self._path = folder.batch_folder(state.batch.id)
        self._limits = LineLimits(host.max_line_bytes, host.max_values, state.batch.endpoint)

    async def run(self) -> None:
        source = await self._begin()
        if source is None:
            return
        with ExitStack() as files:
            results, errors = await asyncio.to_thread(self._open)
            files.enter_context(results)
            files.enter_context(errors)
            outcome = await self._send(source, results, errors)
            if outcome is None:  # the server leaves; an engine that died may have died of this
                self._state.is_running = not self._host.is_engine_well()
                self._folder.save(self._state)
                return
            if outcome == "expired":
                await asyncio.to_thread(self._write_unsent, source, results, errors)
                self._count(results, errors)
        self._finish(outcome)

    def _open(self) -> tuple[ResultFile, ResultFile]:
        """Also of a batch that ended while its files were being handed over."""
        for kind, path in self._result_paths():
            self._folder.reclaim_file(path, result_file_id(self._batch.id, kind))
        (_, results), (_, errors) = self._result_paths()
        return ResultFile(results), ResultFile(errors)

    def _result_paths(self) -> tuple[tuple[str, Path], tuple[str, Path]]:
        return ("output", self._path / "output.jsonl"), ("error", self._path / "errors.jsonl")

    async def _begin(self) -> Path | None:
        """The input, once it is checked; None where the batch has failed."""
        state, batch = self._state, self._batch
        if state.is_running:
            state.num_interruptions += 1
            if state.num_interruptions >= MAX_INTERRUPTIONS:
                said = f"the server ended {MAX_INTERRUPTIONS} times while it ran this batch"
                fail(self._folder, state, "interrupted", said)
                return None
        if self._tenant is None:
            said = f"the server has no key '{state.tenant}' any more"
            fail(self._folder, state, "no_such_key", said)
            return None
        try:
            source = self._folder.content_path(batch.input_file_id)
        except HTTPException as error:
            fail(self._folder, state, "no_such_file", error.detail)
            return None
        if batch.in_progress_at is None and not self._folder.is_cancelled(batch.id):
            total, errors = await asyncio.to_thread(check_lines, source, self._limits, MAX_REQUESTS)
            if errors:
                fail_with(
                    self._folder,
                    state,
                    [
                        BatchError(
                            code=one.code, message=one.message, param=one.param, line=one.line
                        )
                        for one in errors
                    ],
                )
                return None
            batch.request_counts = RequestCounts(total=total)
            batch.in_progress_at = int(time.time())
        batch.status = "in_progress"
        state.is_running = True
        self._folder.save(state)
        return source

    async def _send(self, source: Path, results: ResultFile, errors: ResultFile) -> str | None:
        """The status that it ends with; None where it is to be gone on with."""
        host, batch = self._host, self._batch
        assert self._tenant is not None
        lines = read_lines(source, self._limits)
        await asyncio.to_thread(importlib.import_module, "httpx")  # 0.14 s, for the first batch
        async with in_process_client(host.app, self._tenant) as client:
            ask = ask_over(client, with_priority(BATCH_PRIORITY))

            async def ask_in_turn(line: BatchLine) -> Answer:
                async with self._places:
                    return await ask(line)

            concurrency = min(host.concurrency(), max(1, batch.request_counts.total))
            sending = asyncio.create_task(
                run_lines(
                    lines,
                    ask_in_turn,
                    results,
                    errors,
                    concurrency,
                    is_leaving=host.is_leaving,
                )
            )
            try:
                return await self._watch(sending, results, errors)
            except (Stopped, asyncio.CancelledError):
                return None
            finally:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
                self._count(results, errors)

    async def _watch(
        self, sending: "asyncio.Task[None]", results: ResultFile, errors: ResultFile
    ) -> str:
        """Until all is sent, or somebody wants it to end."""
        while True:
            if self._folder.is_cancelled(self._batch.id):
                return "cancelled"
            if time.time() >= self._batch.expires_at:
                return "expired"
            await asyncio.wait((sending,), timeout=_WATCH_S)
            if sending.done():
                sending.result()
                return "completed"
            if self._count(results, errors):
                self._folder.save(self._state)

    def _count(self, results: ResultFile, errors: ResultFile) -> bool:
        """Whether there is news."""
        counts = self._batch.request_counts
        before = counts.completed, counts.failed
        counts.completed, counts.failed = len(results), len(errors)
        return before != (counts.completed, counts.failed)

    def _write_unsent(self, source: Path, results: ResultFile, errors: ResultFile) -> None:
        said = "the batch expired before this request was done"
        for line in read_lines(source, self._limits):
            if line.custom_id not in results.done and line.custom_id not in errors.done:
                errors.write(line.custom_id, unsent_line(line.custom_id, "batch_expired", said))

    def _finish(self, outcome: str) -> None:
        batch, folder, now = self._batch, self._folder, int(time.time())
        batch.finalizing_at = now if outcome == "completed" else None
        for kind, path in self._result_paths():
            file_id = result_file_id(batch.id, kind)
            kept = folder.adopt_file(path, file_id, f"{batch.id}_{kind}.jsonl")
            setattr(batch, f"{kind}_file_id", None if kept is None else kept.id)
        if outcome == "cancelled":
            batch.cancelling_at = batch.cancelling_at or now
        end(folder, self._state, outcome)


def end(folder: TenantFolder, state: BatchState, status: str) -> None:
    state.batch.status = status
    setattr(state.batch, f"{status}_at", int(time.time()))
    state.is_running = False
    folder.save(state)
    counts = state.batch.request_counts
    _log.info(
        "%s of %s: %s, %d done, %d failed of %d",
        *(state.batch.id, state.tenant, status, counts.completed, counts.failed, counts.total),
    )


def fail(folder: TenantFolder, state: BatchState, code: str, message: str) -> None:
    fail_with(folder, state, [BatchError(code=code, message=message)])


def fail_with(folder: TenantFolder, state: BatchState, errors: list[BatchError]) -> None:
    state.batch.errors = BatchErrors(data=errors)
    end(folder, state, "failed")
