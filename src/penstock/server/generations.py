"""The generations of one HTTP request: started together, merged, measured, and closed together."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import chain

from penstock.errors import BackendError
from penstock.frontend.pipeline import Generation, GenerationPipeline
from penstock.metrics.events import Event, FirstToken, MoreTokens, SampleFinished
from penstock.types.outputs import TextDelta, Usage
from penstock.types.request import FinishReason, GenerateInput

_MAX_BUFFERED_DELTAS = 1024


@dataclass(slots=True)
class _Clock:
    first: float = 0.0
    last: float = 0.0
    num_tokens: int = 0
    cached_tokens: int = 0


class Generations:
    """Iterates over (prompt index, delta) of all samples of all prompts until each has finished."""

    def __init__(
        self,
        running: Sequence[Generation],
        observe: Callable[[Event], None],
        arrived: float,
        sees_tokens: bool,
    ) -> None:
        self.running = running
        self._observe = observe
        self._arrived = arrived
        self._sees_tokens = sees_tokens  # as they come; otherwise each sample arrives whole
        self._clocks = [[_Clock() for _ in range(one.num_samples)] for one in running]

    @classmethod
    async def start(
        cls,
        pipeline: GenerationPipeline,
        inputs: Sequence[GenerateInput],
        observe: Callable[[Event], None],
        stream: bool,
    ) -> "Generations":
        """All of them, or none: when one prompt is refused the others are aborted."""
        arrived = time.monotonic()
        running: list[Generation] = []
        try:
            for one in inputs:
                running.append(await pipeline.generate(one, stream))
        except BaseException:
            await _close(running)
            raise
        return cls(running, observe, arrived, sees_tokens=stream)

    def usage(self) -> Usage:
        """Up to now; a prompt counts once, however many samples it has."""
        return Usage(
            prompt_tokens=sum(len(one.prompt_ids) for one in self.running),
            completion_tokens=sum(clock.num_tokens for one in self._clocks for clock in one),
            cached_tokens=sum(samples[0].cached_tokens for samples in self._clocks),
        )

    async def deltas(self) -> AsyncGenerator[tuple[int, TextDelta], None]:
        async with aclosing(_merge(self.running)) as merged:
            async for prompt, delta in merged:
                if delta.finish is FinishReason.ERROR:
                    raise BackendError(delta.error or "the engine failed on this request")
                self._measure(prompt, delta)
                yield prompt, delta

    async def collect(self) -> list[list[TextDelta]]:
        """Every sample of every prompt, whole."""
        parts: list[list[list[TextDelta]]] = [
            [[] for _ in range(one.num_samples)] for one in self.running
        ]
        async with aclosing(self.deltas()) as deltas:
            async for prompt, delta in deltas:
                parts[prompt][delta.index].append(delta)
        return [[_joined(sample) for sample in samples] for samples in parts]

    async def aclose(self) -> None:
        """Abort what still runs."""
        await _close(self.running)

    def _measure(self, prompt: int, delta: TextDelta) -> None:
        clock = self._clocks[prompt][delta.index]
        now = time.monotonic()
        num_new = len(delta.token_ids)
        if num_new:
            if not clock.num_tokens:
                clock.first = now
            if self._sees_tokens:
                first = FirstToken(now - self._arrived)
                self._observe(MoreTokens(now - clock.last, num_new) if clock.num_tokens else first)
            clock.num_tokens += num_new
            clock.last = now
        clock.cached_tokens = max(clock.cached_tokens, delta.num_cached_tokens)
        if delta.finish is not None:
            self._observe(
                SampleFinished(
                    finish=delta.finish.value,
                    prompt_tokens=len(self.running[prompt].prompt_ids),
                    cached_tokens=clock.cached_tokens,
                    generated_tokens=clock.num_tokens,
                    e2e_s=now - self._arrived,
                    decode_s=clock.last - clock.first if self._sees_tokens else None,
                )
            )


def _joined(parts: Sequence[TextDelta]) -> TextDelta:
    last = parts[-1]
    return TextDelta(
        index=last.index,
        text="".join(part.text for part in parts),
        token_ids=tuple(chain.from_iterable(part.token_ids for part in parts)),
        logprobs=tuple(chain.from_iterable(part.logprobs for part in parts)),
        prompt_logprobs=tuple(chain.from_iterable(part.prompt_logprobs for part in parts)),
        finish=last.finish,
        stop_reason=last.stop_reason,
    )


async def _close(running: Sequence[Generation]) -> None:
    for one in running:
        await one.aclose()


async def _merge(running: Sequence[Generation]) -> AsyncGenerator[tuple[int, TextDelta], None]:
    if len(running) == 1:
        async for delta in running[0]:
            yield 0, delta
        return
    queue: asyncio.Queue[tuple[int, TextDelta] | Exception | None] = asyncio.Queue(
        _MAX_BUFFERED_DELTAS
    )

    async def pump(prompt: int) -> None:
        try:
            async for delta in running[prompt]:
                await queue.put((prompt, delta))
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    pumps = [asyncio.create_task(pump(prompt)) for prompt in range(len(running))]
    try:
        num_open = len(pumps)
        while num_open:
            match await queue.get():
                case None:
                    num_open -= 1
                case Exception() as error:
                    raise error
                case item:
                    yield item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
