"""Sends requests at their times and gathers the responses.

`Arrivals` says when a request may begin, a limit how many may run; a request that has to wait is on
the clock only from its own beginning.
"""

import asyncio
import gc
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from penstock.bench.http import HttpClient, HttpError
from penstock.bench.openai import AnswerReader
from penstock.bench.records import Response

_TIMEOUT_S = 6 * 3600.0  # of one request
_LAG_PERIOD_S = 0.02
_NUM_TOGETHER = 32
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Gaps between requests follow a gamma distribution; `burstiness` 1 is a Poisson process.

    Below 1 they come in bursts, above 1 more evenly. An infinite rate sends all at once.
    """

    rate: float = math.inf  # requests per second
    burstiness: float = 1.0
    seed: int = 0

    def times_s(self, num: int) -> list[float]:
        """When each of `num` requests may begin; the first at once."""
        if math.isinf(self.rate):
            return [0.0] * num
        random = np.random.default_rng(self.seed)
        scale = 1.0 / (self.rate * self.burstiness)
        gaps = random.gamma(self.burstiness, scale, max(0, num - 1))
        return [0.0, *np.cumsum(gaps).tolist()][:num]


@dataclass(slots=True)
class Tally:
    """What has happened so far; changes while a load runs."""

    num_requests: int | None  # None: not known ahead
    num_running: int = 0
    num_ended: int = 0
    num_failed: int = 0
    num_chunks: int = 0
    ended_chunks: int = 0
    ended_tokens: int = 0

    @property
    def num_tokens(self) -> float:
        """Estimated for responses that have not ended: a chunk may hold several tokens."""
        each = self.ended_tokens / self.ended_chunks if self.ended_chunks else 1.0
        return self.ended_tokens + (self.num_chunks - self.ended_chunks) * each

    def count_begin(self) -> None:
        self.num_running += 1

    def count_chunk(self) -> None:
        self.num_chunks += 1

    def count_end(self, response: Response) -> None:
        self.num_running -= 1
        self.num_ended += 1
        self.num_failed += response.error is not None
        self.ended_chunks += response.num_chunks
        self.ended_tokens += response.num_output or response.num_chunks


@dataclass(frozen=True, slots=True)
class Outcome:
    """A whole load. `client_cpu_share`: how busy the measuring process itself was, of one core.

    `client_lag_s`: how late it came to a thing that was due, in the worst of a hundred cases.
    """

    responses: Sequence[Response]
    begun_at: float
    duration_s: float
    client_cpu_share: float
    tally: Tally = field(repr=False)
    client_lag_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Ran:
    """When jobs ran, and what the measuring process was like meanwhile, as in `Outcome`."""

    begun_at: float
    duration_s: float
    client_cpu_share: float
    client_lag_s: float


async def send_all(
    client: HttpClient,
    requests: Sequence[bytes],
    times_s: Sequence[float],
    max_concurrency: int | None = None,
    is_stream: bool = True,
    watch: Callable[[Tally], None] = lambda tally: None,
) -> Outcome:
    """`watch` is given the tally once, before the first request."""
    tally = Tally(len(requests))
    num_at_once = sum(after == 0 for after in times_s)
    await client.open_ahead(min(num_at_once, max_concurrency or num_at_once))
    watch(tally)

    def job(request: bytes) -> Callable[[], Awaitable[Response]]:
        return lambda: ask_counted(client, request, tally, is_stream)

    responses, ran = await run_jobs([job(one) for one in requests], times_s, max_concurrency)
    return Outcome(
        responses, ran.begun_at, ran.duration_s, ran.client_cpu_share, tally, ran.client_lag_s
    )


async def run_jobs(
    jobs: Sequence[Callable[[], Awaitable[_T]]],
    times_s: Sequence[float],
    max_concurrency: int | None = None,
) -> tuple[list[_T], Ran]:
    """Each job at its time, or when there is room for it."""
    room = asyncio.Semaphore(max_concurrency or max(1, len(jobs)))
    loop = asyncio.get_running_loop()

    async def run(job: Callable[[], Awaitable[_T]], due: float) -> _T:
        if (wait_s := due - loop.time()) > 0:
            await asyncio.sleep(wait_s)
        async with room:
            return await job()

    gc.collect()
    gc.freeze()
    gc.disable()  # a collection among so many objects would be a gap in every stream
    try:
        lags_s: list[float] = []
        lag_watch = asyncio.create_task(_watch_lag(lags_s))
        begun_at, begun_cpu, now = time.perf_counter(), time.process_time(), loop.time()
        tasks = []
        for number, (job, after) in enumerate(zip(jobs, times_s, strict=True)):
            tasks.append(asyncio.create_task(run(job, now + after)))
            if number % _NUM_TOGETHER == 0:
                await asyncio.sleep(0)  # first responses are read while the last are still asked
        results = await asyncio.gather(*tasks)
        duration_s = time.perf_counter() - begun_at
        busy = (time.process_time() - begun_cpu) / duration_s
    finally:
        lag_watch.cancel()
        gc.enable()
        gc.unfreeze()
    lag_s = float(np.percentile(lags_s, 99)) if lags_s else 0.0
    return results, Ran(begun_at, duration_s, busy, lag_s)


async def _watch_lag(lags_s: list[float]) -> None:
    while True:
        due = time.perf_counter() + _LAG_PERIOD_S
        await asyncio.sleep(_LAG_PERIOD_S)
        lags_s.append(time.perf_counter() - due)


async def ask_counted(
    client: HttpClient, request: bytes, tally: Tally, is_stream: bool = True
) -> Response:
    tally.count_begin()
    response = await ask_one(client, request, is_stream, tally.count_chunk)
    tally.count_end(response)
    return response


async def ask_one(
    client: HttpClient,
    request: bytes,
    is_stream: bool = True,
    on_chunk: Callable[[], None] = lambda: None,
) -> Response:
    """One request; a failure is in the response's `error`."""
    reader = AnswerReader(is_stream, on_chunk)
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            await client.exchange(request, reader)
        reader.end()
    except HttpError as error:
        reader.response.error = str(error)
    except TimeoutError:
        reader.response.error = f"no end within {_TIMEOUT_S:.0f} s"
    return reader.response
