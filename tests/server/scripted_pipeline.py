"""A pipeline without an engine whose model says what a script tells it to; the parsers are real."""

import asyncio
from collections.abc import AsyncIterator, Callable

from http_fakes import FakeGeneration, FakePipeline, make_tokenizer

from penstock.text.chat_format import ChatFormat
from penstock.types.outputs import TextDelta
from penstock.types.request import FinishReason, GenerateInput

Script = Callable[[str], str]  # the prompt -> what the model writes
TEMPLATE = (
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}{{ message.role }}: "
    "{% if message.reasoning_content %}({{ message.reasoning_content }}) {% endif %}"
    "{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}[{{ call.function.name }}"
    " {{ call.function.arguments | tojson }}]{% endfor %}\n"
    "{% endfor %}"
    "{% if enable_thinking is defined %}thinking: {{ enable_thinking }}\n{% endif %}"
    "{% if reasoning_effort is defined %}effort: {{ reasoning_effort }}\n{% endif %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


class ScriptedPipeline(FakePipeline):
    """Tags as Hermes models and Qwen3 have them; the text comes in pieces of `size` characters."""

    def __init__(self, script: Script, size: int = 3) -> None:
        super().__init__(make_tokenizer(TEMPLATE))
        self.script = script
        self.size = size
        self.prompts: list[str] = []
        self.chat_format = ChatFormat("think", "hermes")

    async def generate(
        self,
        given: GenerateInput,
        stream: bool = True,
        on_first_token: Callable[[], None] = lambda: None,
    ) -> FakeGeneration:
        plain = await super().generate(given, stream, on_first_token)
        if given.pooling is not None:
            return plain
        await plain.aclose()
        self.aborted.pop()
        return ScriptedGeneration(
            self, given, plain.prompt_text, plain.prompt_ids, on_first_token
        ).with_script()


class ScriptedGeneration(FakeGeneration):
    def with_script(self) -> "ScriptedGeneration":
        pipeline, asked = self._pipeline, self._sampling
        assert isinstance(pipeline, ScriptedPipeline)
        pipeline.prompts.append(self._words)
        self._parser = pipeline.chat_format.parser("", None, pipeline.asked[-1].chat.tools)
        self._said = pipeline.script(self._words)
        self._size = pipeline.size
        self._is_slow = "SLOW" in self._words
        self._max_chars = asked.max_tokens or len(self._said)
        return self

    async def __aiter__(self) -> AsyncIterator[TextDelta]:
        said = self._said[: self._max_chars]
        stop = next((one for one in self._sampling.stop if one in said), None)
        said = said if stop is None else said[: said.index(stop)]
        for start in range(0, len(said), self._size):
            await asyncio.sleep(3600 if self._is_slow and start else 0)
            piece = said[start : start + self._size]
            parsed = self._parser.push(piece)
            self.num_tokens += len(piece)
            if not start:
                self._on_first_token()
            yield TextDelta(
                index=0,
                text=parsed.text,
                reasoning=parsed.reasoning,
                tool_calls=parsed.tool_calls,
                token_ids=(0,) * len(piece),
                num_tokens=len(piece),
                num_cached_tokens=0 if start else 4,
            )
        parsed = self._parser.flush()
        self._done()
        is_cut = len(said) < len(self._said) and stop is None
        yield TextDelta(
            index=0,
            text=parsed.text,
            reasoning=parsed.reasoning,
            tool_calls=parsed.tool_calls,
            finish=FinishReason.LENGTH if is_cut else FinishReason.STOP,
            stop_reason=stop,
        )
