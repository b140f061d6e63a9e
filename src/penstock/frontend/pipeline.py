"""`GenerationPipeline`: one prompt's way from text to ids to the engine and back to text.

The HTTP server and `LLM` both go through here. Knows neither HTTP nor the scheduler.
"""

import asyncio
import math
from collections import deque
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Protocol, Self

from msgspec.structs import replace

from penstock.errors import RequestError
from penstock.frontend.client import EngineClient
from penstock.frontend.limits import make_requests
from penstock.frontend.sample import Sample
from penstock.text.chat import ChatTemplate
from penstock.text.dialect import Dialect
from penstock.text.harmony_prompt import HarmonyTemplate
from penstock.text.parsed import AnswerParser
from penstock.text.tokenizer import MAX_CHARS_PER_TOKEN, Tokenizer, check_length
from penstock.types.outputs import TextDelta, TokenDelta
from penstock.types.request import FinishReason, GenerateInput, Request
from penstock.types.sampling import SamplingParams

# Nobody reads a whole answer before its end; a report now and then keeps its size bounded.
_UNSTREAMED_INTERVAL = 64
# In so many tokens at the end of a prompt a chat template opens or closes the block of thoughts.
_NUM_END_TOKENS = 8
# Below this, tokenising costs less than handing it to a thread (about a millisecond).
_INLINE_CHARS = 4096


class GenerationPipeline:
    """`tokenizer` is None when prompts come and answers go as token ids only."""

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer | None,
        chat_template: ChatTemplate | HarmonyTemplate | None,
        stream_interval: int = 1,
        dialect: Dialect = Dialect(),
    ) -> None:
        self.client = client
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.dialect = dialect
        self._stream_interval = stream_interval

    async def generate(self, ask: GenerateInput, stream: bool = True) -> "Generation":
        """Check and submit. `stream=False`: each sample sends one delta, its whole output."""
        sampling = ask.sampling
        if sampling.stop and self.tokenizer is None:
            raise _needs_tokenizer("stop strings", "stop")
        ids, text = await self.tokenize(ask)
        eos_ids = () if self.tokenizer is None else self.tokenizer.eos_ids
        if ask.parse_answer:
            eos_ids += self.dialect.stop_ids
        ranks_samples = sampling.num_samples > sampling.n
        interval = self._stream_interval if stream and not ranks_samples else None
        # Stop strings are found here, so every token must come; else only when there is news.
        report_every = 1 if sampling.stop else interval or _UNSTREAMED_INTERVAL
        requests = make_requests(
            ask, ids, self.client.info, eos_ids, self.client.new_id, report_every
        )
        if len(requests[0].prompt_ids) < len(ids):
            text = None  # it was truncated, so this is not its text any more
        samples = [
            Sample(
                i, sampling, self.tokenizer, interval, self._parser(ask, ids), self.dialect.marks
            )
            for i in range(sampling.num_samples)
        ]
        return Generation(self.client, requests, samples, sampling, text)

    def _parser(self, ask: GenerateInput, prompt_ids: Sequence[int]) -> AnswerParser | None:
        if not ask.parse_answer or self.tokenizer is None or not ask.sampling.detokenize:
            return None
        continued = None
        if ask.chat.continue_final_message and ask.messages:
            continued = str(ask.messages[-1].get("content"))
        prompt_end = self.tokenizer.decode(prompt_ids[-_NUM_END_TOKENS:], skip_special_tokens=False)
        return self.dialect.parser(prompt_end, continued, ask.chat.tools)

    async def tokenize(self, ask: GenerateInput) -> tuple[tuple[int, ...], str | None]:
        """The prompt's ids, and its text unless it came as ids."""
        given = [ask.text is not None, ask.token_ids is not None, ask.messages is not None]
        if sum(given) != 1:
            raise RequestError(
                "invalid_value", "give exactly one of a text, token ids or messages", "prompt"
            )
        if ask.token_ids is not None:
            return ask.token_ids, None
        if self.tokenizer is None:
            raise _needs_tokenizer("a prompt of text or messages", "prompt")
        if _num_chars(ask) <= _INLINE_CHARS:
            return self._encode(ask, self.tokenizer)
        return await asyncio.to_thread(self._encode, ask, self.tokenizer)

    def detokenize(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        if self.tokenizer is None:
            raise _needs_tokenizer("detokenising", "tokens")
        return self.tokenizer.decode(ids, skip_special_tokens)

    def _encode(self, ask: GenerateInput, tokenizer: Tokenizer) -> tuple[tuple[int, ...], str]:
        max_seq_len = self.client.info.max_seq_len
        parts = [ask.text or ""] if ask.messages is None else self._render(ask, max_seq_len)
        text = "".join(parts)
        check_length(text, max_seq_len)
        ids = tokenizer.encode(parts[0], ask.add_special_tokens)
        for part in parts[1:]:
            ids += tokenizer.encode(part, add_special_tokens=False)
        return tuple(ids), text

    def _render(self, ask: GenerateInput, max_seq_len: int) -> list[str]:
        assert ask.messages is not None
        if self.chat_template is None:
            raise RequestError(
                "no_chat_template",
                "this model has no chat template; start with --chat_template FILE (or 'simple' for "
                "'role: content' lines), or send a plain prompt",
                "messages",
            )
        max_chars = max_seq_len * MAX_CHARS_PER_TOKEN
        return self.chat_template.parts(ask.messages, ask.chat, max_chars)


class Reader(Protocol):
    """Who is handed deltas as they arrive. Neither method may raise."""

    def take(self, delta: TextDelta) -> None: ...

    def fail(self, bug: Exception) -> None:
        """No more deltas come: we made a mistake."""


class Generation:
    """A running request: the text deltas of all samples, each until its `finish`.

    Iterate over them, or have them handed over with `push_to`. Closing it, leaving its `async
    with`, or cancelling whoever iterates aborts what still runs.
    """

    def __init__(
        self,
        client: EngineClient,
        requests: Sequence[Request],
        samples: Sequence[Sample],
        sampling: SamplingParams,
        prompt_text: str | None,
    ) -> None:
        self.prompt_ids = requests[0].prompt_ids
        self.prompt_text = prompt_text
        self.num_samples = sampling.n
        self._client = client
        self._sampling = sampling
        self._must_rank = len(samples) > sampling.n
        self._ready: deque[TextDelta] = deque()
        self._reader: Reader | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._bug: Exception | None = None
        self._open = {request.id: sample for request, sample in zip(requests, samples, strict=True)}
        client.submit(requests, self._take)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TextDelta:
        while not self._has_news():
            assert self._waiter is None, "a generation has one reader"
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

    def push_to(self, reader: Reader) -> None:
        """Hand over every delta in the call that brings it, which spares a task switch for each."""
        self._reader = reader
        self._push()

    def hold(self) -> None:
        """The reader is slow: gather tokens until `release`, as ids and not as deltas."""
        for sample in self._open.values():
            sample.is_held = True

    def release(self) -> None:
        for sample in self._open.values():
            sample.is_held = False
            if (delta := sample.catch_up()) is not None:
                self._ready.append(delta)
        self._push()

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
        """Abort what still runs; iterating ends, a reader hears no more."""
        self._reader = None
        self._drop()

    def _take(self, delta: TokenDelta) -> None:
        """A delta has arrived: make its text and pass it on."""
        sample = self._open.get(delta.request_id)
        if sample is None:
            return  # a stop string ended it before this arrived
        try:
            text = sample.push(delta)
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
        self._push()

    def _push(self) -> None:
        """To the reader, or wake who iterates, if there is something to read."""
        reader = self._reader
        if reader is None:
            self._wake()
        elif self._bug is not None:
            reader.fail(self._bug)
        elif self._has_news():
            self._rank()
            while self._ready:
                reader.take(self._ready.popleft())

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


def _num_chars(ask: GenerateInput) -> int:
    if ask.text is not None:
        return len(ask.text)
    return sum(len(str(message.get("content", ""))) for message in ask.messages or ())


def _needs_tokenizer(what: str, param: str) -> RequestError:
    return RequestError(
        "no_tokenizer",
        f"{what} needs a tokenizer and this engine runs without one; send ids",
        param,
    )
