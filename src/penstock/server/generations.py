"""The generations of one HTTP request: started together, merged, measured, and closed together.

A streamed token comes from the engine's message to the socket in one chain of calls, without a task
or a queue in between:

    _EngineLink.deliver      frontend/client.py       TokenDelta, to the generation of its request
    Generation.on_tokens     frontend/generation.py   TokenDelta -> TextDelta (`Sample.push`)
    Generation._pass_on      frontend/generation.py   TextDelta, once there is something to send
    Generations.on_text      server/generations.py    TextDelta of one prompt, measured
    EventStream.write_event  server/sse.py            TextDelta -> bytes (`Responder.event`)
    SocketPipe.write         server/pipe.py           bytes, to the connection
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

from penstock.errors import BackendError
from penstock.frontend.generation import Generation
from penstock.frontend.pipeline import GenerationPipeline
from penstock.metrics.events import Event, FirstToken, MoreTokens, SampleFinished
from penstock.types.outputs import TextDelta, Usage
from penstock.types.request import FinishReason, GenerateInput

Write = Callable[[int, TextDelta], None]  # prompt index, delta


@dataclass(slots=True)
class _Clock:
    first: float = 0.0
    last: float = 0.0
    num_tokens: int = 0
    cached_tokens: int = 0


class Generations:
    """Writes (prompt index, delta) of all samples of all prompts until each has finished."""

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
        self._finishes: dict[str, None] = {}  # each reason once, in order
        self._write: Write  # from `stream_to` on
        self._ended: asyncio.Future[Exception | None]

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
        capacity, info = pipeline.client.capacity, pipeline.client.info
        num_samples = inputs[0].sampling.num_samples
        num_sequences = num_samples * len(inputs)
        capacity.check_request(info, num_samples, num_sequences)

        def first_token() -> None:
            observe(FirstToken(time.monotonic() - arrived))

        num_tokens = 0
        running: list[Generation] = []
        try:
            for one in inputs:
                if running:
                    await asyncio.sleep(0)  # a thousand long prompts would hold up the event loop
                running.append(await pipeline.generate(one, stream, first_token))
                num_tokens += len(running[-1].prompt_ids) * num_samples
                if len(running) > 1:  # one alone was checked by the client, before it went out
                    capacity.check_request(info, num_samples, num_sequences, num_tokens)
        except BaseException:
            await _close(running)
            raise
        return cls(running, observe, arrived, sees_tokens=stream)

    def usage(self) -> Usage:
        """Up to now; a prompt counts once, however many samples it has."""
        return Usage(
            prompt_tokens=self.num_prompt_tokens,
            completion_tokens=sum(clock.num_tokens for one in self._clocks for clock in one),
            cached_tokens=sum(samples[0].cached_tokens for samples in self._clocks),
        )

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(one.prompt_ids) for one in self.running)

    @property
    def num_generated_tokens(self) -> int:
        """Up to now, whoever has been told of them; those of samples that lost count too."""
        return sum(one.num_tokens for one in self.running)

    @property
    def finish(self) -> str:
        """How the samples have ended, each reason once; those that have not are cancelled."""
        is_open = self._num_open and FinishReason.ERROR.value not in self._finishes
        return ",".join([*self._finishes, *([FinishReason.ABORT.value] if is_open else [])])

    async def stream_to(self, write: Write) -> Exception | None:
        """`write` each delta in the call that brings its tokens, until the last or an error."""
        self._write = write
        self._ended = asyncio.get_running_loop().create_future()
        for prompt, one in enumerate(self.running):
            one.subscribe(prompt, self.on_text, self._end)
        return await self._ended

    def on_text(self, prompt_index: int, delta: TextDelta) -> None:
        """Measure and write it. An error of one sample ends the stream of all."""
        if delta.finish is FinishReason.ERROR:
            self._finishes[delta.finish.value] = None
            self._end(BackendError(delta.error or "the engine failed on this request"))
            return
        try:
            is_last = self._measure(prompt_index, delta)
            self._write(prompt_index, delta)
        except Exception as bug:  # of this request alone: others share the caller
            self._end(bug)
            return
        if is_last:
            self._end(None)

    def _end(self, error: Exception | None) -> None:
        if not self._ended.done():
            self._ended.set_result(error)

    def hold(self) -> None:
        """The client reads too slowly: gather tokens until `release`."""
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
        error = await self.stream_to(lambda prompt, delta: parts[prompt][delta.index].append(delta))
        if error is not None:
            raise error
        return [[_joined(sample) for sample in samples] for samples in parts]

    async def aclose(self) -> None:
        """Abort what still runs."""
        await _close(self.running)

    def _measure(self, prompt_index: int, delta: TextDelta) -> bool:
        """Count it; whether it was the last of all."""
        clock = self._clocks[prompt_index][delta.index]
        now = time.monotonic()
        num_new = delta.num_tokens
        if num_new:
            if not clock.num_tokens:
                clock.first = now
            elif self._sees_tokens:
                self._observe(MoreTokens(now - clock.last, num_new))
            clock.num_tokens += num_new
            clock.last = now
        clock.cached_tokens = max(clock.cached_tokens, delta.num_cached_tokens)
        if delta.finish is None:
            return False
        self._finishes[delta.finish.value] = None
        self._observe(
            SampleFinished(
                finish=delta.finish.value,
                prompt_tokens=len(self.running[prompt_index].prompt_ids),
                cached_tokens=clock.cached_tokens,
                generated_tokens=clock.num_tokens,
                e2e_s=now - self._arrived,
                decode_s=clock.last - clock.first if self._sees_tokens else None,
            )
        )
        self._num_open -= 1
        return self._num_open == 0


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
        tokens_per_step=last.tokens_per_step,
        pooled=last.pooled,
        beam_score=last.beam_score,
    )


async def _close(running: Sequence[Generation]) -> None:
    for one in running:
        await one.aclose()
