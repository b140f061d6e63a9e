"""`ChatFormat`: how a model tags its reasoning and its tool calls, and which parser reads them.

Chosen once per model: by name, or from what its chat template writes. Makes one parser per sample.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import ConfigError
from penstock.text import harmony
from penstock.text.grammars.output_grammar import AnswerStart
from penstock.text.harmony import HarmonyParser
from penstock.text.output_parser import OutputParser, TextParser
from penstock.text.reasoning import think
from penstock.text.reasoning.think import ThinkParser
from penstock.text.tokenizer import Tokenizer
from penstock.text.tools.formats import FORMATS, format_of
from penstock.text.tools.schemas import ToolSchemas

# The names a user may give -> what reads it. "none" reads nothing, "auto" asks the template.
# vLLM and TensorRT-LLM name the same format by several models; both kinds of names are taken.
REASONING = {
    **dict.fromkeys(("think", "qwen3", "deepseek_v3", "deepseek_v31", "glm45"), "think"),
    **dict.fromkeys(("nano-v3", "nemotron_v3", "nemotron-v3"), "think"),
    **dict.fromkeys(("deepseek-r1", "deepseek_r1"), "deepseek-r1"),
    **dict.fromkeys(("kimi_k2", "kimi_k25"), "kimi_k2"),
    **dict.fromkeys(("harmony", "gpt_oss", "openai_gptoss"), "harmony"),
}
TOOLS = {
    **dict.fromkeys(("hermes", "qwen3"), "hermes"),
    **dict.fromkeys(("qwen3_coder", "qwen3_xml"), "qwen3_coder"),
    **dict.fromkeys(("llama3_json", "llama4_json"), "llama3_json"),
    **dict.fromkeys(("pythonic", "llama4_pythonic"), "pythonic"),
    **dict.fromkeys(("deepseek_v3", "deepseek_v31"), "deepseek_v3"),
    "mistral": "mistral",
    **dict.fromkeys(("glm45", "glm4", "glm47"), "glm45"),
    "kimi_k2": "kimi_k2",
    **dict.fromkeys(("harmony", "gpt_oss", "openai"), "harmony"),
}
# Tags that end reasoning without its closing tag, which the model forgets before a tool call.
_INTERRUPTS = {"kimi_k2": FORMATS["kimi_k2"].tags[:1]}


@dataclass(frozen=True, slots=True)
class ChatFormat:
    reasoning: str | None = None  # a value of REASONING
    tools: str | None = None  # a value of TOOLS
    tags: Mapping[int, str] = field(default_factory=dict)  # token ids -> text for the parser
    stop_ids: tuple[int, ...] = ()  # end an output, besides the model's own

    def parser(
        self, prompt_end: str, continued: str | None = None, tools: Sequence[Mapping[str, Any]] = ()
    ) -> OutputParser | None:
        """For one sample.

        `prompt_end` are the last words of the prompt, which may open a reasoning block;
        `continued` is the assistant's message that the output goes on with, if it is not a new one.
        """
        if self.reasoning == "harmony":
            return HarmonyParser(ToolSchemas(tools).names, in_final=continued is not None)
        reasoning = None
        if self.reasoning is not None:
            begins_inside = self._begins_inside(prompt_end.rstrip(), continued)
            reasoning = ThinkParser(begins_inside, _INTERRUPTS.get(self.reasoning, ()))
        calls = FORMATS[self.tools].parser(tools) if self.tools is not None and tools else None
        return None if reasoning is None and calls is None else TextParser(reasoning, calls)

    def answer_start(self, prompt_end: str, continued: str | None = None) -> AnswerStart:
        """Where the answer of an output begins; arguments as of `parser`."""
        prompt_end = prompt_end.rstrip()
        is_inside = self._begins_inside(prompt_end, continued)
        is_past = continued is not None or prompt_end.endswith(think.CLOSE)
        return AnswerStart(
            reasoning=self.reasoning,
            tools=self.tools,
            is_inside=is_inside,
            is_past=is_past and not is_inside,
        )

    def _begins_inside(self, prompt_end: str, continued: str | None) -> bool:
        if continued is not None:
            return continued.rfind(think.OPEN) > continued.rfind(think.CLOSE)
        is_closed = prompt_end.endswith(think.CLOSE)
        return prompt_end.endswith(think.OPEN) or (
            self.reasoning == "deepseek-r1" and not is_closed
        )


def choose_chat_format(
    tokenizer: Tokenizer, templates: Iterable[str], reasoning: str | None, tools: str | None
) -> ChatFormat:
    """`reasoning` and `tools` as in the configuration: a name, "auto", or None for none."""
    text = "\n".join(templates)
    thinks = _named(reasoning, REASONING, _reasoning_of(text))
    calls = _named(tools, TOOLS, _tools_of(text))
    if "harmony" in (thinks, calls):
        if thinks != calls:
            return _without_harmony(tokenizer, thinks, calls, reasoning, tools)
        letters = harmony.special_token_letters(tokenizer)
        if len(letters) < len(harmony.SPECIAL_TOKENS):
            raise ConfigError(
                "this tokenizer lacks tokens of the harmony format "
                f"({', '.join(harmony.SPECIAL_TOKENS)}); choose another reasoning_parser and "
                "tool_parser"
            )
        return ChatFormat(thinks, calls, letters, harmony.end_ids(tokenizer))
    return ChatFormat(thinks, calls, _special_tags(tokenizer, thinks, calls))


def _named(given: str | None, known: Mapping[str, str], found: str | None) -> str | None:
    if given is None or given == "none":
        return None
    return found if given == "auto" else known[given]


def _without_harmony(
    tokenizer: Tokenizer,
    thinks: str | None,
    calls: str | None,
    reasoning: str | None,
    tools: str | None,
) -> ChatFormat:
    """One of the two is harmony, which is one format for both."""
    if None in (thinks, calls) and "auto" in (reasoning, tools):
        return ChatFormat()  # the other one was switched off
    raise ConfigError(
        f"reasoning_parser is '{reasoning}' and tool_parser is '{tools}'; harmony reads both "
        "reasoning and tool calls, so name it in both, or leave both on auto"
    )


def _reasoning_of(template: str) -> str | None:
    if _is_harmony(template):
        return "harmony"
    if think.CLOSE not in template:
        return None
    return "kimi_k2" if format_of(template) == "kimi_k2" else "think"


def _tools_of(template: str) -> str | None:
    if _is_harmony(template):
        return "harmony"
    return format_of(template)


def _is_harmony(template: str) -> bool:
    return "<|channel|>" in template and "<|message|>" in template


def _special_tags(tokenizer: Tokenizer, thinks: str | None, calls: str | None) -> dict[int, str]:
    """Tags that the vocabulary calls special: they would be left out of the text."""
    tags = (think.OPEN, think.CLOSE, *_INTERRUPTS.get(thinks, ())) if thinks else ()
    tags += FORMATS[calls].tags if calls else ()
    ids = {tag: tokenizer.id_of(tag) for tag in tags}
    return {one: tag for tag, one in ids.items() if one in tokenizer.special_ids}
