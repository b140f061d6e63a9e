"""`GenerationPipeline`: one prompt's way from text to ids to the engine and back to text.

The HTTP server and `LLM` both go through here. Knows neither HTTP nor the scheduler.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Self

from msgspec.structs import replace

from penstock.errors import RequestError
from penstock.frontend.client import EngineClient
from penstock.frontend.limits import make_requests
from penstock.frontend.rendering import Renderer
from penstock.frontend.sample import Sample
from penstock.text.chat_format import ChatFormat
from penstock.text.grammars.output_grammar import AnswerStart, is_free, output_grammar
from penstock.text.output_parser import OutputParser
from penstock.text.tokenizer import MAX_CHARS_PER_TOKEN, Tokenizer, check_length
from penstock.types.outputs import TextDelta, TokenDelta
from penstock.types.request import FinishReason, GenerateInput, Request
from penstock.types.sampling import SamplingParams

OnText = Callable[[int, TextDelta], None]  # whose, as `subscribe` was told; the delta
OnBug = Callable[[Exception], None]

# Nobody reads an unstreamed output before its end; a report now and then keeps its size bounded.
_UNSTREAMED_INTERVAL = 64
# In so many tokens at the end of a prompt a chat template opens or closes the reasoning block.
_NUM_END_TOKENS = 8
# Below this, tokenizing costs less than handing it to a thread (about a millisecond).
_INLINE_CHARS = 4096
_INLINE_IDS = 2048


class GenerationPipeline:
    """`tokenizer` is None when prompts and outputs are token ids only."""

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer | None,
        renderer: Renderer | None,
        stream_interval: int = 1,
        chat_format: ChatFormat = ChatFormat(),
    ) -> None:
        self.client = client
        self.tokenizer = tokenizer
        self.renderer = renderer
        self.chat_format = chat_format
        self._stream_interval = stream_interval

    async def generate(
        self,
        ask: GenerateInput,
        stream: bool = True,
        on_first_token: Callable[[], None] = lambda: None,
    ) -> "Generation":
        """Check and submit. `stream=False`: each sample sends one delta, its whole output.

        `on_first_token` is called once per sample, when its first token arrives.
        """
        sampling = ask.sampling
        if sampling.stop and self.tokenizer is None:
            raise _needs_tokenizer("stop strings", "stop")
        ids, text = await self.tokenize(ask)
        eos_ids = () if self.tokenizer is None else self.tokenizer.eos_ids
        if ask.parse_output:
            eos_ids += self.chat_format.stop_ids
        ranks_samples = sampling.num_samples > sampling.n
        stream_interval = self._stream_interval if stream and not ranks_samples else None
        # Stop strings are found here, so every token must come; else only when there is news.
        engine_interval = 1 if sampling.stop else stream_interval or _UNSTREAMED_INTERVAL
        requests = make_requests(
            ask,
            ids,
            self.client.info,
            eos_ids,
            self.client.new_id,
            engine_interval,
            await self._grammar(ask, ids),
        )
        if len(requests[0].prompt_ids) < len(ids):
            text = None  # it was truncated, so this is not its text any more
        samples = [
            Sample(
                i,
                sampling,
                self.tokenizer,
                stream_interval,
                self._parser(ask, ids),
                self.chat_format.tags,
                self.client.info.tokens_per_block,
            )
            for i in range(sampling.num_samples)
        ]
        return Generation(self.client, requests, samples, sampling, text, on_first_token)

    async def aclose(self) -> None:
        """End open requests, and what renders their messages."""
        if self.renderer is not None:
            await self.renderer.aclose()
        await self.client.close()

    def _parser(self, ask: GenerateInput, prompt_ids: Sequence[int]) -> OutputParser | None:
        if not ask.parse_output or self.tokenizer is None or not ask.sampling.detokenize:
            return None
        return self.chat_format.parser(*self._beginning(ask, prompt_ids), ask.chat.tools)

    def _beginning(self, ask: GenerateInput, prompt_ids: Sequence[int]) -> tuple[str, str | None]:
        """The prompt's last words, and the message that the output continues."""
        assert self.tokenizer is not None
        continued = None
        if ask.chat.continue_final_message and ask.messages:
            continued = str(ask.messages[-1].get("content"))
        last_ids = prompt_ids[-_NUM_END_TOKENS:]
        return self.tokenizer.decode(last_ids, skip_special_tokens=False), continued

    async def _grammar(self, ask: GenerateInput, prompt_ids: Sequence[int]) -> str | None:
        """What the output must match, checked. Large schemas take a while: in a thread."""
        guided, tools = ask.sampling.guided_decoding, ask.chat.tools if ask.parse_output else ()
        if is_free(guided, tools, ask.tool_rule):
            return None
        if self.tokenizer is None:
            param = "tools" if guided is None else guided.param
            raise _needs_tokenizer("an output that must match a grammar", param)
        start = AnswerStart()
        if ask.parse_output:
            start = self.chat_format.answer_start(*self._beginning(ask, prompt_ids))
        return await asyncio.to_thread(
            output_grammar,
            self.tokenizer,
            start,
            guided,
            tools,
            ask.tool_rule,
            ask.parallel_tool_calls,
        )

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
        max_seq_len = self.client.info.max_seq_len
        parts = [ask.text or ""] if ask.messages is None else await self._render(ask, max_seq_len)
        text = "".join(parts)
        check_length(text, max_seq_len)
        if len(text) <= _INLINE_CHARS:
            return _encode(self.tokenizer, parts, ask.add_special_tokens), text
        ids = await asyncio.to_thread(_encode, self.tokenizer, parts, ask.add_special_tokens)
        return ids, text

    async def detokenize(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        if self.tokenizer is None:
            raise _needs_tokenizer("detokenizing", "tokens")
        if len(ids) <= _INLINE_IDS:
            return self.tokenizer.decode(ids, skip_special_tokens)
        return await asyncio.to_thread(self.tokenizer.decode, ids, skip_special_tokens)

    async def _render(self, ask: GenerateInput, max_seq_len: int) -> list[str]:
        assert ask.messages is not None
        if self.renderer is None:
            raise RequestError(
                "no_chat_template",
                "this model has no chat template; start with --chat_template FILE (or 'simple' for "
                "'role: content' lines), or send a plain prompt",
                "messages",
            )
        max_chars = max_seq_len * MAX_CHARS_PER_TOKEN
        return await self.renderer.parts(ask.messages, ask.chat, max_chars)


def _encode(
    tokenizer: Tokenizer, parts: Sequence[str], add_special_tokens: bool
) -> tuple[int, ...]:
    ids = tokenizer.encode(parts[0], add_special_tokens)
    for part in parts[1:]:
        ids += tokenizer.encode(part, add_special_tokens=False)
    return tuple(ids)


class Generation:
    """A running request: the text deltas of all samples, each until its `finish`.

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


def _needs_tokenizer(what: str, param: str) -> RequestError:
    return RequestError(
        "no_tokenizer",
        f"{what} needs a tokenizer and this engine runs without one; send ids",
        param,
    )
