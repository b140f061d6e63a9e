"""`output_grammar`: what a request asks of its output -> the grammar that the engine follows.

The answer's grammar begins where the answer begins: after the reasoning of models that reason, in
the final channel of harmony. Before it the output is free.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import llguidance

from penstock.errors import RequestError
from penstock.text.grammars.json_schema import ANY_OBJECT, schema_grammar
from penstock.text.grammars.rules import ANY_TEXT, Rules
from penstock.text.grammars.structural_tag import structural_tag
from penstock.text.grammars.tool_grammars import Call, calls_of, forced, grammar_of, offered
from penstock.text.reasoning import think
from penstock.text.tokenizer import Tokenizer
from penstock.types.guided_decoding import GuidedDecodingParams
from penstock.types.request import ToolRule

MAX_CHOICES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerStart:
    """What stands before the answer. `tools` and `reasoning` are names of `chat_format`."""

    reasoning: str | None = None
    tools: str | None = None
    is_inside: bool = False  # the prompt has opened the reasoning
    is_past: bool = False  # the prompt has closed it, or the output goes on with an answer


def is_free(
    guided: GuidedDecodingParams | None,
    tools: Sequence[Mapping[str, Any]],
    rule: ToolRule | None,
) -> bool:
    """Whether nothing is asked of an output; tools alone ask nothing unless one is strict."""
    is_strict = any(tool["function"].get("strict") is True for tool in tools)
    return guided is None and rule is None and not is_strict


def output_grammar(
    tokenizer: Tokenizer,
    start: AnswerStart,
    guided: GuidedDecodingParams | None,
    tools: Sequence[Mapping[str, Any]] = (),
    rule: ToolRule | None = None,
    several_calls: bool = True,
) -> str:
    """Of an output that is not free. `rule`: a tool must be called."""
    rules = Rules(tokenizer)
    param = guided.param if guided is not None else "tools" if rule is None else "tool_choice"
    names = None if rule is None else rule.names
    several = several_calls and not (rule is not None and rule.is_named)
    calls = calls_of(rules, tools, names) if tools else []
    if start.reasoning == "harmony":
        text = _harmony(rules, start, guided, calls, rule is not None)
    else:
        text = _before(rules, start) + _answer(rules, start, guided, calls, rule, several, param)
    return rules.to_text(text, param)


def _answer(
    rules: Rules,
    start: AnswerStart,
    guided: GuidedDecodingParams | None,
    calls: Sequence[Call],
    rule: ToolRule | None,
    several: bool,
    param: str,
) -> str:
    if not calls:
        assert guided is not None
        return _guided(rules, guided)
    form = grammar_of(start.tools, param)
    if rule is not None:
        return forced(rules, form, calls, several)
    if guided is not None:  # the answer, or a call instead of it
        return f"({forced(rules, form, calls, several)} | {_guided(rules, guided)})"
    return offered(rules, form, calls, several)


def _before(rules: Rules, start: AnswerStart) -> str:
    """Reasoning up to its closing tag; where the prompt has not opened it, the model may."""
    if start.reasoning is None or start.is_past:
        return ""
    blanks = rules.rule("BLANKS", r"/[ \t\r\n]{0,8}/")
    reasoning = f"{rules.up_to('reasoning', think.CLOSE)} {blanks}"
    if start.is_inside:
        return f"{reasoning} "
    return f"({blanks} {rules.words(think.OPEN, think.OPEN)} {reasoning})? "


_HARMONY = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>")


def _harmony(
    rules: Rules,
    start: AnswerStart,
    guided: GuidedDecodingParams | None,
    calls: Sequence[Call],
    must_call: bool,
) -> str:
    """Messages of analysis, then one of the final channel, or one to a function."""
    if start.is_past:
        if must_call or guided is None:
            raise RequestError(
                "unsupported", "a continued message cannot become a tool call", "tool_choice"
            )
        return _guided(rules, guided)
    words, text = (lambda s: rules.words(s, *_HARMONY)), rules.rule("TEXT", ANY_TEXT)
    turn = words("<|end|><|start|>assistant")
    analysis = f"{words('<|channel|>analysis<|message|>')} {text} {turn}"
    preamble = f"{words('<|channel|>commentary<|message|>')} {text} {turn}"
    json_kind = f"({words(' <|constrain|>json')} | {words(' json')})?"
    endings = []
    for call in calls:
        recipient = f" to=functions.{call.name}"  # on either side of the channel
        arguments = call.arguments
        heads = (f"<|channel|>commentary{recipient}", f"{recipient}<|channel|>commentary")
        endings += [
            f"{words(head)} {json_kind} {words('<|message|>')} {arguments}" for head in heads
        ]
    if not must_call:
        answer = text if guided is None else _guided(rules, guided)
        kind = "" if guided is None else json_kind
        endings.append(f"{words('<|channel|>final')} {kind} {words('<|message|>')} {answer}")
    return f"({analysis} | {preamble})* ({' | '.join(endings)})"


def _guided(rules: Rules, guided: GuidedDecodingParams) -> str:
    param = guided.param
    match guided.kind:
        case "json_object":
            return rules.part(schema_grammar(ANY_OBJECT, param, guided.whitespace_pattern))
        case "json":
            return rules.part(schema_grammar(guided.json, param, guided.whitespace_pattern))
        case "regex":
            assert guided.regex is not None
            found = json.loads(llguidance.LLMatcher.grammar_from_regex(guided.regex))
            return rules.part({"lark_grammar": found["grammars"][0]["lark_grammar"]})
        case "choice":
            return rules.part({"lark_grammar": f"start: {_choices(guided)}"})
        case "grammar":
            assert guided.grammar is not None
            try:
                lark = llguidance.grammar_from("ebnf", guided.grammar)
            except ValueError as error:
                raise RequestError("invalid_value", f"{param}: {error}", param) from None
            return rules.part({"lark_grammar": lark})
        case _:
            return structural_tag(guided.structural_tag, rules, param)


def _choices(guided: GuidedDecodingParams) -> str:
    choices = guided.choice or ()
    is_right = all(isinstance(one, str) and one for one in choices)
    if not is_right or not 0 < len(choices) <= MAX_CHOICES:
        raise RequestError(
            "invalid_value",
            f"{guided.param}: a choice is a list of 1 to {MAX_CHOICES} texts, none of them empty",
            guided.param,
        )
    return " | ".join(json.dumps(one, ensure_ascii=False) for one in choices)
