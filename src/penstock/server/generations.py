"""The generations of one HTTP request: started together, merged, measured, and closed together."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

from penstock.errors import BackendError
from penstock.frontend.pipeline import Generation, GenerationPipeline
from penstock.metrics.events import Event, FirstToken, MoreTokens, SampleFinished
from penstock.types.outputs import TextDelta, Usage
from penstock.types.request import FinishReason, GenerateInput

Take = Callable[[int, TextDelta], None]  # prompt index, delta
Ended = Callable[[Exception | None], None]


@dataclass(slots=True)
class _Clock:
    first: float = 0.0
    last: float = 0.0
    num_tokens: int = 0
    cached_tokens: int = 0


class Generations:
    """Hands over (prompt index, delta) of all samples of all prompts until each has finished."""

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
        self._num_open = sum(one.num_samples for one in running)

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

    def push_to(self, take: Take, ended: Ended) -> None:
        """`take` each delta in the call that brings it; `ended` after the last or an error."""
        for prompt, one in enumerate(self.running):
            one.push_to(_PromptReader(self, prompt, take, ended))

    def hold(self) -> None:
        """Whoever takes is slow: gather tokens until `release`."""
        for one in self.running:
            one.hold()

    def release(self) -> None:
        for one in self.running:
            one.release()

    async def collect(self) -> list[list[TextDelta]]:
        """Every sample of every prompt, whole."""
        parts: list[list[list[TextDelta]]] = [
            [[] for _ in range(one.num_samples)] for one in self.running
        ]
        ended: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        self.push_to(
            lambda prompt, delta: parts[prompt][delta.index].append(delta),
            lambda error: None if ended.done() else ended.set_result(error),
        )
        if (error := await ended) is not None:
            raise error
        return [[_joined(sample) for sample in samples] for samples in parts]

    async def aclose(self) -> None:
        """Abort what still runs."""
        await _close(self.running)

    def measure(self, prompt: int, delta: TextDelta) -> bool:
        """Count it; whether it was the last of all."""
        clock = self._clocks[prompt][delta.index]
        now = time.monotonic()
        num_new = delta.num_tokens
        if num_new:
            if not clock.num_tokens:
                clock.first = now
            if self._sees_tokens:
                first = not clock.num_tokens
                since = now - (self._arrived if first else clock.last)
                self._observe(FirstToken(since) if first else MoreTokens(since, num_new))
            clock.num_tokens += num_new
            clock.last = now
        clock.cached_tokens = max(clock.cached_tokens, delta.num_cached_tokens)
        if delta.finish is None:
            return False
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
        self._num_open -= 1
        return self._num_open == 0


class _PromptReader:
    """Reads one prompt's generation; an error of one ends the answer to all."""

    def __init__(self, all_of_them: Generations, prompt: int, take: Take, ended: Ended) -> None:
        self._all = all_of_them
        self._prompt = prompt
        self._take = take
        self._ended = ended

    def take(self, delta: TextDelta) -> None:
        if delta.finish is FinishReason.ERROR:
            self.fail(BackendError(delta.error or "the engine failed on this request"))
            return
        try:
            is_last = self._all.measure(self._prompt, delta)
            self._take(self._prompt, delta)
        except Exception as bug:  # of this request alone: others share the caller
            self.fail(bug)
            return
        if is_last:
            self._ended(None)

    def fail(self, bug: Exception) -> None:
        self._ended(bug)


def _joined(parts: Sequence[TextDelta]) -> TextDelta:
    last = parts[-1]
    return TextDelta(
        index=last.index,
        text="".join(part.text for part in parts),
        reasoning="".join(part.reasoning for part in parts),
        tool_calls=tuple(chain.from_iterable(part.tool_calls for part in parts)),
        token_ids=tuple(chain.from_iterable(part.token_ids for part in parts)),
        num_tokens=sum(part.num_tokens for part in parts),
        logprobs=tuple(chain.from_iterable(part.logprobs for part in parts)),
        stop_logprob=last.stop_logprob,
        prompt_logprobs=tuple(chain.from_iterable(part.prompt_logprobs for part in parts)),
        finish=last.finish,
        stop_reason=last.stop_reason,
    )


async def _close(running: Sequence[Generation]) -> None:
    for one in running:
        await one.aclose()
