"""Runs requests through an engine of its own, without HTTP, and measures them.

The way from the prompt's ids on is that of `LLM` and of the server.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.bench.load import Outcome, Tally
from penstock.bench.progress import shown
from penstock.bench.records import Ask, Response
from penstock.config.schema import EngineConfig
from penstock.errors import PenstockError
from penstock.frontend.pipeline import GenerationPipeline
from penstock.frontend.start import start_pipeline, stop_pipeline
from penstock.ipc.messages import EngineInfo
from penstock.types.request import FinishReason, GenerateInput
from penstock.types.sampling import SamplingParams
from penstock.types.stats import IterationStats

_STATS_S = 0.5  # the engine tells of its steps within this time


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineOptions:
    concurrency: int | None = None  # most requests at once; None: as many as the engine takes
    streaming: bool = False  # tokens are reported as they come, so first ones can be timed
    num_warmup: int = 2
    sampling: Mapping[str, Any] = field(default_factory=dict)  # fields of `SamplingParams`
    show_progress: bool = True


@dataclass(frozen=True, slots=True)
class OfflineRun:
    outcome: Outcome
    info: EngineInfo
    token_ids: Sequence[tuple[int, ...]]  # of the responses
    iterations: Sequence[IterationStats]


async def run_offline(
    config: EngineConfig, asks: Sequence[Ask], options: OfflineOptions
) -> OfflineRun:
    """All prompts must be token ids. The first `num_warmup` are asked once ahead, uncounted."""
    pipeline, handle = await start_pipeline(config)
    try:
        for ask in asks[: options.num_warmup]:
            await _ask(pipeline, ask, options, Tally(0))
        pipeline.client.drain_iterations()
        return await _run_all(pipeline, asks, options)
    finally:
        await stop_pipeline(pipeline, handle)


async def _run_all(
    pipeline: GenerationPipeline, asks: Sequence[Ask], options: OfflineOptions
) -> OfflineRun:
    info, tally = pipeline.client.info, Tally(len(asks))
    room = asyncio.Semaphore(min(options.concurrency or info.max_queued, info.max_queued))

    async def run(ask: Ask) -> tuple[Response, tuple[int, ...]]:
        async with room:
            return await _ask(pipeline, ask, options, tally)

    async with shown(options.show_progress) as watch:
        watch(tally)
        begun_at, begun_cpu = time.perf_counter(), time.process_time()
        ended = await asyncio.gather(*(run(ask) for ask in asks))
        duration_s = time.perf_counter() - begun_at
        busy = (time.process_time() - begun_cpu) / duration_s
    outcome = Outcome([response for response, _ in ended], begun_at, duration_s, busy, tally)
    await asyncio.sleep(_STATS_S)
    iterations = pipeline.client.drain_iterations()
    return OfflineRun(outcome, info, [ids for _, ids in ended], iterations)


async def _ask(
    pipeline: GenerationPipeline, ask: Ask, options: OfflineOptions, tally: Tally
) -> tuple[Response, tuple[int, ...]]:
    assert not isinstance(ask.prompt, str)
    sampling = SamplingParams(max_tokens=ask.max_tokens, **options.sampling)
    tally.num_running += 1
    ids: list[int] = []
    response = Response(started_at=time.perf_counter())
    try:
        asked = GenerateInput(token_ids=ask.prompt, sampling=sampling)
        async with await pipeline.generate(asked, stream=options.streaming) as generation:
            async for delta in generation:
                now = time.perf_counter()
                if delta.token_ids:
                    response.note(now)
                    tally.count_chunk()
                ids += delta.token_ids
                response.text += delta.text
                if delta.finish is FinishReason.ERROR:
                    response.error = delta.error or "the engine failed"
        if not response.first_at:  # it ended before its first token of text
            response.note(time.perf_counter())
    except PenstockError as error:
        response.error = str(error)
    response.num_output, response.num_prompt = len(ids), len(ask.prompt)
    tally.count_end(response)
    return response, tuple(ids)
