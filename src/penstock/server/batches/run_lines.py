"""`run_lines`: sends the requests of a batch, so many at a time, and writes each result when it is
there.

`Ask` hides where they go: to the endpoints of this process (`endpoints`) or to a server elsewhere.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.errors import BackendError
from penstock.server.batches.lines import BatchLine, ResultFile, result_line

if TYPE_CHECKING:  # a server starts without it, which spares 0.14 s (2026-11-16)
    import httpx

MAX_FAILURES = 4  # of a server to answer one request, until its status is the result
_MAX_PAUSE_S = 30.0
_MAX_BODY_SHOWN = 2000  # characters of an answer that is no JSON


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    body: Any
    retry_after_s: float | None = None


Ask = Callable[[BatchLine], Awaitable[Answer]]


class Stopped(Exception):
    """The batch is to be left as it is, for another time."""


async def run_lines(
    lines: Iterator[BatchLine],
    ask: Ask,
    results: ResultFile,
    errors: ResultFile,
    concurrency: int,
    on_result: Callable[[], None] = lambda: None,
    is_leaving: Callable[[], bool] = lambda: False,
) -> None:
    """All lines that neither file has. A status other than 200 goes to `errors`."""

    reading = asyncio.Lock()

    async def next_line() -> BatchLine | None:
        async with reading:  # in a thread: a line may have megabytes to decode
            return await asyncio.to_thread(next, lines, None)

    async def work() -> None:
        while (line := await next_line()) is not None:
            if line.custom_id in results.done or line.custom_id in errors.done:
                continue
            if is_leaving():
                raise Stopped
            answer = await _persistent(ask, line, is_leaving)
            file = results if answer.status == 200 else errors
            file.write(line.custom_id, result_line(line.custom_id, answer.status, answer.body))
            on_result()

    tasks = [asyncio.create_task(work()) for _ in range(concurrency)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _persistent(ask: Ask, line: BatchLine, is_leaving: Callable[[], bool]) -> Answer:
    """Waits for room as long as it takes; asks again a few times where the server fails."""
    num_failures, pause_s = 0, 0.5
    while True:
        answer = await ask(line)
        if answer.status not in (429, 503):
            return answer
        if is_leaving():  # what ends requests while a server leaves is not their fault
            raise Stopped
        num_failures += answer.status == 503
        if num_failures >= MAX_FAILURES:
            return answer
        pause_s = min(_MAX_PAUSE_S, 2 * pause_s)
        await asyncio.sleep(answer.retry_after_s or pause_s)


def ask_over(client: "httpx.AsyncClient", prepare: Callable[[dict[str, Any]], None]) -> Ask:
    """By HTTP, or within the process where the client's transport is an application. `prepare` may
    change a body before it is sent."""
    import httpx

    async def ask(line: BatchLine) -> Answer:
        prepare(line.body)
        content, headers = msgspec.json.encode(line.body), {"content-type": "application/json"}
        num_failures = 0
        while True:
            try:
                response = await client.post(line.url, content=content, headers=headers)
                break
            except httpx.TransportError as error:
                num_failures += 1
                if num_failures >= MAX_FAILURES:
                    said = str(error) or type(error).__name__
                    raise BackendError(f"{client.base_url} does not answer: {said}") from None
                await asyncio.sleep(2.0**num_failures / 2)
        return Answer(response.status_code, _body(response), _retry_after(response))

    return ask


def _body(response: "httpx.Response") -> Any:
    try:
        return msgspec.json.decode(response.content)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return {"error": {"message": response.text[:_MAX_BODY_SHOWN], "code": "no_json"}}


def _retry_after(response: "httpx.Response") -> float | None:
    text = response.headers.get("retry-after", "")
    return min(float(text), _MAX_PAUSE_S) if text.isascii() and text.isdigit() else None
