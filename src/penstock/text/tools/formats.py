"""The formats in which models write tool calls: tags and the order of things, one table each.

How their blocks are read is in `json_call`, `xml_call` and `python_call`. Of the openings that
begin with one tag, no text fits two.
"""

import re
import uuid
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.text.tools.call_parser import After, Block, CallParser, Opening
from penstock.text.tools.calls import Calls
from penstock.text.tools.heads import BLANKS, NAME, Before, Found, Maybe, Step
from penstock.text.tools.json_call import JsonArguments, JsonCall
from penstock.text.tools.python_call import PythonCall
from penstock.text.tools.schemas import ToolSchemas
from penstock.text.tools.xml_call import ParameterTags, XmlArguments

_KEY = re.compile(r"([^<>\n]{1,256})")
_ID = re.compile(r"([^\s<>\[\]{}]{1,256})")


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """`tags` may be special tokens, which a parser must see all the same."""

    tags: tuple[str, ...]
    parser: Callable[[Sequence[Mapping[str, Any]]], CallParser]


# Hermes, Qwen 2.5 and 3: <tool_call>{"name": .., "arguments": ..}</tool_call>
_TOOL_CALL, _TOOL_CALL_END = "<tool_call>", "</tool_call>"


def _hermes(tools: Sequence[Mapping[str, Any]]) -> CallParser:
    return CallParser([Opening((_TOOL_CALL,), _json_call(After(closings=(_TOOL_CALL_END,))))])


def _json_call(
    after: After, names: Container[str] | None = None
) -> Callable[[Calls, Found, str], Block]:
    return lambda calls, found, head: JsonCall(calls, head, after, names)


# Llama 3: {"name": .., "parameters": ..} is the whole message, or follows <|python_tag|>; several
# are separated by semicolons. The object of a plain answer has no name of a tool.
_PYTHON_TAG = "<|python_tag|>"


def _llama3_json(tools: Sequence[Mapping[str, Any]]) -> CallParser:
    def next_call(calls: Calls, found: Found, head: str) -> Block:
        return JsonCall(calls, head, After(further), names)

    names = ToolSchemas(tools).names
    further = (
        Opening((Before(("{",)),), next_call),
        Opening((";", BLANKS, Before(("{",))), next_call),
    )
    tagged = Opening((_PYTHON_TAG, BLANKS, Before(("{",))), _json_call(After(further)))
    return CallParser([tagged], bare=further[:1])


# Llama 4: [f(a=1), g()] is the whole message, or stands between tags.
_PYTHON_START, _PYTHON_END = "<|python_start|>", "<|python_end|>"


def _pythonic(tools: Sequence[Mapping[str, Any]]) -> CallParser:
    def begin(calls: Calls, found: Found, head: str) -> Block | None:
        return PythonCall(calls, found.words[0], head, after) if found.words[0] in names else None

    names = ToolSchemas(tools).names
    call: tuple[Step, ...] = (BLANKS, NAME, "(")
    after = After((Opening((",", *call), begin),), ends=("]",), closings=(_PYTHON_END,))
    tagged = Opening((_PYTHON_START, BLANKS, "[", *call), begin)
    return CallParser([tagged], bare=[Opening(("[", *call), begin)])


def _named(
    openings: Sequence[tuple[Step, ...]],
    after: After,
    name_and_id: Callable[[tuple[str, ...]], tuple[str, str]] = lambda words: (words[-1], ""),
) -> list[Opening]:
    """Calls of a head with the name and an object with the arguments."""

    def begin(calls: Calls, found: Found, head: str) -> Block | None:
        name, call_id = name_and_id(found.words)
        if not name:
            return None
        calls.begin(name, call_id)
        return JsonArguments(calls, after)

    return [Opening(steps, begin) for steps in openings]


# DeepSeek V3 and R1: BEGIN function SEP name, then the arguments in a fence; V3.1: BEGIN name SEP
# arguments.
_DS_CALLS, _DS_CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_DS_CALL, _DS_CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_DS_SEP = "<｜tool▁sep｜>"
_FENCE = "```"


def _deepseek(tools: Sequence[Mapping[str, Any]]) -> CallParser:
    closings = (_DS_CALL_END, _DS_CALLS_END)
    openings: list[Opening] = []
    begin: tuple[Step, ...]
    for begin in ((_DS_CALLS, BLANKS, _DS_CALL), (_DS_CALL,)):
        bare = (*begin, NAME, _DS_SEP, BLANKS, Before(("{", _DS_CALL_END)))
        fence = (BLANKS, Maybe(_FENCE + "json"), BLANKS, Before(("{", _FENCE, _DS_CALL_END)))
        fenced = (*begin, NAME, _DS_SEP, NAME, *fence)
        openings += _named([bare], After(closings=closings))
        openings += _named([fenced], After(ends=(_FENCE,), closings=closings))
    return CallParser(openings)


# Kimi K2: the head is the id, functions.NAME:NUMBER, which its template wants back.
_KIMI_CALLS, _KIMI_CALLS_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_KIMI_CALL, _KIMI_CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
_KIMI_ARGUMENTS = "<|tool_call_argument_begin|>"
_KIMI_NUMBER = re.compile(r":[0-9]+$")


def _kimi(tools: Sequence[Mapping[str, Any]]) -> CallParser:
    arguments = (_ID, BLANKS, _KIMI_ARGUMENTS, BLANKS, Before(("{", _KIMI_CALL_END)))
    openings = ((_KIMI_CALLS, BLANKS, _KIMI_CALL), (_KIMI_CALL,))
    return CallParser(
        _named(
            [(*opening, BLANKS, *arguments) for opening in openings],
            After(closings=(_KIMI_CALL_END, _KIMI_CALLS_END)),
            lambda words: (_KIMI_NUMBER.sub("", words[0]).removeprefix("functions."), words[0]),
        )
    )


# Mistral: [TOOL_CALLS][{"name": .., "arguments": ..}, ..], later [TOOL_CALLS]name[ARGS]{..}, with
# a [CALL_ID] or without. Its templates want ids of nine letters and digits.
_MISTRAL, _MISTRAL_ID, _MISTRAL_ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


def _mistral(tools: Sequence[Mapping[str, Any]]) -> CallParser:
    def next_call(calls: Calls, found: Found, head: str) -> Block:
        return JsonCall(calls, head, in_list)

    brace = Before(("{",))
    in_list = After((Opening((",", BLANKS, brace), next_call),), ends=("]",))
    openings = [
        Opening((_MISTRAL, BLANKS, "[", BLANKS, brace), next_call),
        Opening((_MISTRAL, BLANKS, brace), _json_call(After())),
        *_named([(_MISTRAL, BLANKS, NAME, Maybe(_MISTRAL_ARGS), BLANKS, brace)], After()),
        *_named(
            [(_MISTRAL, BLANKS, NAME, _MISTRAL_ID, _ID, _MISTRAL_ARGS, BLANKS, brace)],
            After(),
            lambda words: (words[0], words[1]),
        ),
    ]
    return CallParser(openings, calls=Calls(lambda: uuid.uuid4().hex[:9]))


def _tagged(
    openings: Sequence[tuple[Step, ...]],
    tools: Sequence[Mapping[str, Any]],
    tags: ParameterTags,
    after: After,
) -> CallParser:
    """Calls of a head with the name, and a tag per parameter."""
    schemas = ToolSchemas(tools)

    def begin(calls: Calls, found: Found, head: str) -> Block:
        calls.begin(found.words[0])
        return XmlArguments(calls, found.words[0], schemas, tags, after)

    return CallParser([Opening(steps, begin) for steps in openings])


# Qwen3-Coder: <tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>;
# the model forgets the outermost tag now and then.
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER = "<parameter="


def _qwen3_coder(tools: Sequence[Mapping[str, Any]]) -> CallParser:
    head = (_FUNCTION, NAME, ">", BLANKS, Before((_PARAMETER, _FUNCTION_END, _TOOL_CALL_END)))
    tags = ParameterTags((BLANKS, _PARAMETER, _KEY, ">"), "</parameter>", True, _TOOL_CALL_END)
    after = After(closings=(_FUNCTION_END, _TOOL_CALL_END))
    return _tagged([(_TOOL_CALL, BLANKS, *head), head], tools, tags, after)


# GLM 4.5 and later: <tool_call>name<arg_key>..</arg_key><arg_value>..</arg_value></tool_call>
_ARG_KEY = "<arg_key>"


def _glm(tools: Sequence[Mapping[str, Any]]) -> CallParser:
    head = (_TOOL_CALL, BLANKS, NAME, BLANKS, Before((_ARG_KEY, _TOOL_CALL_END)))
    opening = (BLANKS, _ARG_KEY, _KEY, "</arg_key>", BLANKS, "<arg_value>")
    tags = ParameterTags(opening, "</arg_value>", False, _TOOL_CALL_END)
    return _tagged([head], tools, tags, After(closings=(_TOOL_CALL_END,)))


FORMATS = {
    "hermes": ToolFormat((_TOOL_CALL, _TOOL_CALL_END), _hermes),
    "qwen3_coder": ToolFormat((_TOOL_CALL, _TOOL_CALL_END), _qwen3_coder),
    "llama3_json": ToolFormat((_PYTHON_TAG,), _llama3_json),
    "pythonic": ToolFormat((_PYTHON_START, _PYTHON_END), _pythonic),
    "deepseek_v3": ToolFormat(
        (_DS_CALLS, _DS_CALLS_END, _DS_CALL, _DS_CALL_END, _DS_SEP), _deepseek
    ),
    "mistral": ToolFormat((_MISTRAL, _MISTRAL_ID, _MISTRAL_ARGS), _mistral),
    "glm45": ToolFormat(
        (_TOOL_CALL, _TOOL_CALL_END, _ARG_KEY, "</arg_key>", "<arg_value>", "</arg_value>"), _glm
    ),
    "kimi_k2": ToolFormat(
        (_KIMI_CALLS, _KIMI_CALLS_END, _KIMI_CALL, _KIMI_CALL_END, _KIMI_ARGUMENTS), _kimi
    ),
}


# Strings that a chat template holds -> its format; the first that fits.
_MARKS = (
    ((_KIMI_CALLS,), "kimi_k2"),
    ((_DS_CALLS,), "deepseek_v3"),
    ((_MISTRAL,), "mistral"),
    ((_TOOL_CALL, _ARG_KEY), "glm45"),
    ((_FUNCTION, _PARAMETER), "qwen3_coder"),
    ((_FUNCTION,), None),  # JSON in that tag: an older format of Llama
    ((_TOOL_CALL,), "hermes"),
    (("func_name1(params_name1=",), "pythonic"),
    (('{"name": function name, "parameters":',), "llama3_json"),
)


def format_of(template: str) -> str | None:
    """As which of these a chat template writes tool calls, or tells the model to."""
    for marks, name in _MARKS:
        if all(mark in template for mark in marks):
            return name
    return None
