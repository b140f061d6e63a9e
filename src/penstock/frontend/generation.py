"""`Generation`: a running prompt: token deltas of its samples in, their text deltas out.

Knows neither HTTP nor how a prompt became ids (`pipeline`).
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Self

from msgspec.structs import replace

from penstock.frontend.client import EngineClient
from penstock.frontend.sample import Sample
from penstock.types.outputs import TextDelta, TokenDelta
from penstock.types.request import FinishReason, Request
from penstock.types.sampling import SamplingParams

OnText = Callable[[int, TextDelta], None]  # whose, as `subscribe` was told; the delta
OnBug = Callable[[Exception], None]


class Generation:
    """A running prompt: the text deltas of all samples, each until its `finish`. Making one submits
    its requests, one per sample; it is their sink (`on_tokens`).

    Iterate over them, or `subscribe`. Closing it, leaving its `async with`, or cancelling whoever
    iterates aborts what still runs.
    """

    def __init__(
        self,
        client: EngineClient,
        requests: Sequence[Request],
        samples: Sequence[Sample],
        sampling: SamplingParams,
        prompt_text: str | None,
        on_first_token: Callable[[], None],
    ) -> None:
        self.prompt_ids = requests[0].prompt_ids
        self.prompt_text = prompt_text
        self.num_samples = sampling.n
        self._client = client
        self._sampling = sampling
        self._samples = samples
        self._on_first_token = on_first_token
        self._must_rank = len(samples) > sampling.n
        self._ready: deque[TextDelta] = deque()
        self._on_text: OnText | None = None  # the subscriber's, if there is one
        self._on_bug: OnBug
        self._prompt = 0
        self._waiter: asyncio.Future[None] | None = None
        self._bug: Exception | None = None
        self._open = {request.id: sample for request, sample in zip(requests, samples, strict=True)}
        client.submit(requests, self.on_tokens)

    @property
    def num_tokens(self) -> int:
        """Arrived up to now, of all samples, also of those that lost."""
        return sum(sample.num_tokens for sample in self._samples)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TextDelta:
        while not self._has_news():
            assert self._waiter is None, "a generation has one consumer"
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            except asyncio.CancelledError:
                self._drop()
                raise
            finally:
                self._waiter = None
        if self._bug is not None:
            raise self._bug
        self._rank()
        if not self._ready:
            raise StopAsyncIteration
        return self._ready.popleft()

    def subscribe(self, prompt: int, on_text: OnText, on_bug: OnBug) -> None:
        """Call `on_text` with every delta in the call that brings its tokens, which spares a task
        switch for each; `on_bug` instead if we made a mistake. Neither may raise. `prompt` tells
        the subscriber of several generations which one speaks.
        """
        self._prompt, self._on_text, self._on_bug = prompt, on_text, on_bug
        self._pass_on()

    def hold(self) -> None:
        """The client reads too slowly: gather token ids until `release`, send no deltas."""
        for sample in self._open.values():
            sample.is_held = True

    def release(self) -> None:
        for sample in self._open.values():
            sample.is_held = False
            if (delta := sample.catch_up()) is not None:
                self._ready.append(delta)
        self._pass_on()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    def abort(self) -> None:
        """End what still runs; iterating goes on to its `FinishReason.ABORT`."""
        self._client.abort(list(self._open))

    async def aclose(self) -> None:
        """Abort what still runs; iterating ends, a subscriber hears no more."""
        self._on_text = None
        self._drop()

    def on_tokens(self, delta: TokenDelta) -> None:
        """Tokens from the engine (`EngineClient`): make their text and pass it on."""
        sample = self._open.get(delta.request_id)
        if sample is None:
            return  # a stop string ended it before this arrived
        is_silent = not sample.num_tokens
        try:
            text = sample.push(delta)
            if is_silent and sample.num_tokens:
                self._on_first_token()
        except Exception as bug:  # this request's alone: the others share the caller
            self._bug = bug
            self._drop()
        else:
            if text is not None:
                self._ready.append(text)
            if sample.is_done:
                del self._open[delta.request_id]
                if delta.finish is None:
                    self._client.abort([delta.request_id])
        self._pass_on()

    def _pass_on(self) -> None:
        """What is ready to the subscriber; without one, wake whoever iterates."""
        on_text = self._on_text
        if on_text is None:
            self._wake()
        elif self._bug is not None:
            self._on_bug(self._bug)
        elif self._has_news():
            self._rank()
            while self._ready:
                on_text(self._prompt, self._ready.popleft())

    def _rank(self) -> None:
        if self._must_rank:
            self._must_rank = False
            self._ready = deque(_best(self._ready, self._sampling))

    def _has_news(self) -> bool:
        return not self._open or (bool(self._ready) and not self._must_rank)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done() and self._has_news():
            self._waiter.set_result(None)

    def _drop(self) -> None:
        """Forget everything first, so that the terminal deltas of the abort go nowhere."""
        ids = list(self._open)
        self._open.clear()
        self._ready.clear()
        self._must_rank = False
        self._client.abort(ids)
        self._wake()


def _best(samples: Iterable[TextDelta], sampling: SamplingParams) -> list[TextDelta]:
    """The `n` finished samples with the best cumulative log-probability, renumbered, best first."""
    in_order = sorted(samples, key=lambda sample: sample.index)
    ranked = sorted(in_order, key=_cumulative_logprob, reverse=True)[: sampling.n]
    best = [replace(sample, index=i, prompt_logprobs=()) for i, sample in enumerate(ranked)]
    # The prompt's log-probabilities came with the first sample, whatever became of it.
    best[0] = replace(best[0], prompt_logprobs=in_order[0].prompt_logprobs)
    if sampling.logprobs is None:
        best = [replace(sample, logprobs=()) for sample in best]
    return best


def _cumulative_logprob(sample: TextDelta) -> float:
    if sample.finish is FinishReason.ERROR:
        return -math.inf
    return math.fsum(entry.logprob for entry in sample.logprobs)
