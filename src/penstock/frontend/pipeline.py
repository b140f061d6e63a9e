"""`GenerationPipeline`: one prompt's way from text to ids to the engine.

The way back is the `Generation` that it returns (`generation`, `sample`). The HTTP server and `LLM`
both go through here. Knows neither HTTP nor the scheduler.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from penstock.errors import RequestError
from penstock.frontend.beam_generation import BeamGeneration
from penstock.frontend.client import EngineClient
from penstock.frontend.generation import Generation
from penstock.frontend.limits import make_requests
from penstock.frontend.output_grammars import OutputGrammars
from penstock.frontend.rendering import Renderer
from penstock.frontend.sample import Sample
from penstock.text.chat_format import ChatFormat
from penstock.text.fill_in_middle import find_fim_tokens
from penstock.text.grammars.output_grammar import AnswerStart, is_free
from penstock.text.output_parser import OutputParser
from penstock.text.reasoning.budget import thinking_budget
from penstock.text.tokenizer import MAX_CHARS_PER_TOKEN, Tokenizer, check_length
from penstock.types.request import GenerateInput, ThinkingBudget
from penstock.types.sampling import MAX_BAD_WORD_TOKENS, SamplingParams

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
        request_renderer: Renderer | None = None,
    ) -> None:
        """`request_renderer` renders by templates of requests; None: they may bring none."""
        self.client = client
        self.tokenizer = tokenizer
        self.renderer = renderer
        self._request_renderer = request_renderer
        self.chat_format = chat_format
        self._grammars = None if tokenizer is None else OutputGrammars(tokenizer)
        self._fim = None if tokenizer is None else find_fim_tokens(tokenizer)
        self._stream_interval = stream_interval

    async def generate(
        self,
        ask: GenerateInput,
        stream: bool = True,
        on_first_token: Callable[[], None] = lambda: None,
    ) -> Generation:
        """Check and submit, which making the `Generation` does.

        `stream=False`: each sample sends one delta, its whole output.
        `on_first_token` is called once per sample, when its first token arrives.
        """
        if ask.sampling.bad_words:
            ask = replace(ask, sampling=self._with_bad_ids(ask.sampling))
        sampling = ask.sampling
        if sampling.stop and self.tokenizer is None:
            raise _needs_tokenizer("stop strings", "stop")
        ids, text = await self.tokenize(ask)
        eos_ids = () if self.tokenizer is None else self.tokenizer.eos_ids
        if ask.parse_output:
            eos_ids += self.chat_format.stop_ids
        if ask.suffix is not None and self._fim is not None:
            eos_ids += self._fim.stop_ids
        ranks_samples = sampling.num_samples > sampling.n
        stream_interval = self._stream_interval if stream and not ranks_samples else None
        # Stop strings are found here, so every token must come; else only when there is news.
        engine_interval = 1 if sampling.stop else stream_interval or _UNSTREAMED_INTERVAL
        searches = sampling.use_beam_search
        requests = make_requests(
            replace(ask, sampling=replace(sampling, n=1, best_of=None)) if searches else ask,
            ids,
            self.client.info,
            eos_ids,
            self.client.new_id,
            engine_interval,
            await self._grammar(ask, ids),
            self._thinking(ask, ids),
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
            for i in range(sampling.n if searches else sampling.num_samples)
        ]
        if searches:
            return BeamGeneration(self.client, requests[0], samples, sampling, text, on_first_token)
        return Generation(self.client, requests, samples, sampling, text, on_first_token)

    def _with_bad_ids(self, sampling: SamplingParams) -> SamplingParams:
        """A word is also bad behind a space, where most tokenizers have other tokens for it."""
        if self.tokenizer is None:
            raise _needs_tokenizer("bad_words", "bad_words")
        found = dict.fromkeys(sampling.bad_words_token_ids)
        for word in sampling.bad_words:
            for text in (word, f" {word.lstrip()}"):
                ids = tuple(self.tokenizer.encode(text, add_special_tokens=False))
                if not 0 < len(ids) <= MAX_BAD_WORD_TOKENS:
                    raise RequestError(
                        "invalid_value",
                        f"bad_words: {word[:80]!r} has {len(ids)} tokens, a word has 1 to "
                        f"{MAX_BAD_WORD_TOKENS}",
                        "bad_words",
                    )
                found[ids] = None
        return replace(sampling, bad_words=(), bad_words_token_ids=tuple(found))

    async def aclose(self) -> None:
        """End open requests, and what renders their messages."""
        for renderer in (self.renderer, self._request_renderer):
            if renderer is not None:
                await renderer.aclose()
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
        """What the output must match, checked."""
        guided, tools = ask.sampling.guided_decoding, ask.chat.tools if ask.parse_output else ()
        if is_free(guided, tools, ask.tool_rule):
            return None
        if self._grammars is None:
            param = "tools" if guided is None else guided.param
            raise _needs_tokenizer("an output that must match a grammar", param)
        start = AnswerStart()
        if ask.parse_output:
            start = self.chat_format.answer_start(*self._beginning(ask, prompt_ids))
        return await self._grammars.get(
            start, guided, tools, ask.tool_rule, ask.parallel_tool_calls
        )

    def _thinking(self, ask: GenerateInput, prompt_ids: Sequence[int]) -> ThinkingBudget | None:
        num_tokens = ask.sampling.thinking_token_budget
        if num_tokens is None:
            return None
        if self.tokenizer is None:
            raise _needs_tokenizer("a thinking budget", "thinking_token_budget")
        start = self.chat_format.answer_start(*self._beginning(ask, prompt_ids))
        return thinking_budget(self.tokenizer, start, num_tokens, bool(ask.chat.tools))

    async def tokenize(self, ask: GenerateInput) -> tuple[tuple[int, ...], str | None]:
        """The prompt's ids, and its text unless it came as ids."""
        given = [ask.text is not None, ask.token_ids is not None, ask.messages is not None]
        if sum(given) != 1:
            raise RequestError(
                "invalid_value", "give exactly one of a text, token ids or messages", "prompt"
            )
        if ask.suffix is not None:
            return await self._around(ask, ask.suffix), None
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

    async def _around(self, ask: GenerateInput, suffix: str) -> tuple[int, ...]:
        """The prompt of a text that is to be filled in."""
        if self.tokenizer is None:
            raise _needs_tokenizer("a suffix", "suffix")
        if self._fim is None:
            raise RequestError(
                "unsupported",
                "suffix: this model's vocabulary has no tokens for filling in the middle, as those "
                "of Qwen-Coder, CodeLlama, StarCoder and DeepSeek-Coder have; leave it out, or "
                "serve such a model",
                "suffix",
            )
        if ask.truncate_prompt_tokens is not None:
            raise RequestError(
                "unsupported",
                "truncate_prompt_tokens would cut the beginning off that a suffix needs; leave one "
                "of them out",
                "truncate_prompt_tokens",
            )
        prefix = ask.text if ask.token_ids is None else ask.token_ids
        assert prefix is not None
        text = suffix if ask.text is None else ask.text + suffix
        check_length(text, self.client.info.max_seq_len)
        work = partial(self._fim.prompt, self.tokenizer, prefix, suffix, ask.add_special_tokens)
        return work() if len(text) <= _INLINE_CHARS else await asyncio.to_thread(work)

    async def detokenize(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        if self.tokenizer is None:
            raise _needs_tokenizer("detokenizing", "tokens")
        if len(ids) <= _INLINE_IDS:
            return self.tokenizer.decode(ids, skip_special_tokens)
        return await asyncio.to_thread(self.tokenizer.decode, ids, skip_special_tokens)

    async def _render(self, ask: GenerateInput, max_seq_len: int) -> list[str]:
        assert ask.messages is not None
        renderer = self.renderer
        if ask.chat.template is not None:
            renderer = self._request_renderer
            if renderer is None:
                raise RequestError(
                    "unsupported",
                    "chat_template: a request may bring its own only where the server is started "
                    "with --trust_request_chat_template; leave it out, or name one for all "
                    "requests with --chat_template",
                    "chat_template",
                )
        if renderer is None:
            raise RequestError(
                "no_chat_template",
                "this model has no chat template; start with --chat_template FILE (or 'simple' for "
                "'role: content' lines), or send a plain prompt",
                "messages",
            )
        max_chars = max_seq_len * MAX_CHARS_PER_TOKEN
        return await renderer.parts(ask.messages, ask.chat, max_chars)


def _encode(
    tokenizer: Tokenizer, parts: Sequence[str], add_special_tokens: bool
) -> tuple[int, ...]:
    ids = tokenizer.encode(parts[0], add_special_tokens)
    for part in parts[1:]:
        ids += tokenizer.encode(part, add_special_tokens=False)
    return tuple(ids)


def _needs_tokenizer(what: str, param: str) -> RequestError:
    return RequestError(
        "no_tokenizer",
        f"{what} needs a tokenizer and this engine runs without one; send ids",
        param,
    )
