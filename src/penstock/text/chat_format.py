"""How a model marks its thoughts and its tool calls, and which parser reads that.

Chosen once per model: by name, or from what its chat template writes. Makes one parser per sample.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import ConfigError
from penstock.text import harmony
from penstock.text.harmony import HarmonyParser
from penstock.text.parsed import AnswerParser, TextParser
from penstock.text.reasoning import think
from penstock.text.reasoning.think import ThinkParser
from penstock.text.tokenizer import Tokenizer
from penstock.text.tools import hermes
from penstock.text.tools.hermes import HermesParser

# The names a user may give -> what reads it. "none" reads nothing, "auto" asks the template.
REASONING = {
    "think": "think",
    "qwen3": "think",
    "deepseek-r1": "deepseek-r1",
    "deepseek_r1": "deepseek-r1",
    "harmony": "harmony",
    "gpt_oss": "harmony",
}
TOOLS = {"hermes": "hermes", "qwen3": "hermes", "harmony": "harmony", "gpt_oss": "harmony"}


@dataclass(frozen=True, slots=True)
class Dialect:
    reasoning: str | None = None  # a value of REASONING
    tools: str | None = None  # a value of TOOLS
    marks: Mapping[int, str] = field(default_factory=dict)  # tokens -> their text for the parser
    stop_ids: tuple[int, ...] = ()  # end an answer, besides the model's own

    def parser(
        self, prompt_end: str, continued: str | None = None, tools: Sequence[Mapping[str, Any]] = ()
    ) -> AnswerParser | None:
        """For one sample.

        `prompt_end` are the last words of the prompt, which may open a block of thoughts;
        `continued` is the assistant's message that the answer goes on with, if it is not a new one.
        """
        if self.reasoning == "harmony":
            return HarmonyParser(_names(tools), in_answer=continued is not None)
        thoughts = None
        if self.reasoning is not None:
            thoughts = ThinkParser(self._begins_inside(prompt_end.rstrip(), continued))
        calls = HermesParser() if self.tools is not None and tools else None
        return None if thoughts is None and calls is None else TextParser(thoughts, calls)

    def _begins_inside(self, prompt_end: str, continued: str | None) -> bool:
        if continued is not None:
            return continued.rfind(think.OPEN) > continued.rfind(think.CLOSE)
        is_closed = prompt_end.endswith(think.CLOSE)
        return prompt_end.endswith(think.OPEN) or (
            self.reasoning == "deepseek-r1" and not is_closed
        )


def _names(tools: Iterable[Mapping[str, Any]]) -> list[str]:
    functions = [tool.get("function") for tool in tools]
    return [str(one.get("name")) for one in functions if isinstance(one, Mapping)]


def choose_dialect(
    tokenizer: Tokenizer, templates: Iterable[str], reasoning: str | None, tools: str | None
) -> Dialect:
    """`reasoning` and `tools` as in the configuration: a name, "auto", or None for none."""
    text = "\n".join(templates)
    thinks = _named(reasoning, REASONING, _reasoning_of(text))
    calls = _named(tools, TOOLS, _tools_of(text))
    if "harmony" in (thinks, calls):
        if thinks != calls:
            return _without_harmony(tokenizer, thinks, calls, reasoning, tools)
        letters = harmony.mark_letters(tokenizer)
        if len(letters) < len(harmony.MARKS):
            raise ConfigError(
                "this tokenizer lacks tokens of the harmony format "
                f"({', '.join(harmony.MARKS)}); choose another reasoning_parser and tool_parser"
            )
        stops = [tokenizer.id_of(mark) for mark in harmony.STOP_MARKS]
        return Dialect(thinks, calls, letters, tuple(one for one in stops if one is not None))
    return Dialect(thinks, calls, _special_marks(tokenizer, thinks, calls))


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
) -> Dialect:
    """One of the two is harmony, which is one format for both."""
    if None in (thinks, calls) and "auto" in (reasoning, tools):
        return Dialect()  # the other one was switched off
    raise ConfigError(
        f"reasoning_parser is '{reasoning}' and tool_parser is '{tools}'; harmony reads both "
        "thoughts and tool calls, so name it in both, or leave both on auto"
    )


def _reasoning_of(template: str) -> str | None:
    if _is_harmony(template):
        return "harmony"
    return "think" if think.CLOSE in template else None


def _tools_of(template: str) -> str | None:
    if _is_harmony(template):
        return "harmony"
    # Other formats use the same mark around something that is not JSON.
    is_other = "<function=" in template or "<arg_key>" in template
    return "hermes" if hermes.OPEN in template and not is_other else None


def _is_harmony(template: str) -> bool:
    return "<|channel|>" in template and "<|message|>" in template


def _special_marks(tokenizer: Tokenizer, thinks: str | None, calls: str | None) -> dict[int, str]:
    """Marks that the vocabulary calls special: they would be left out of the text."""
    marks = (*((think.OPEN, think.CLOSE) if thinks else ()),)
    marks += (hermes.OPEN, hermes.CLOSE) if calls else ()
    ids = {mark: tokenizer.id_of(mark) for mark in marks}
    return {one: mark for mark, one in ids.items() if one in tokenizer.special_ids}
