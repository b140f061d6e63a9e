"""What a task is: examples, how long an answer may be, and which answers are right."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from penstock.types.outputs import CompletionOutput

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One question and its known answer; `group` is the row of the report it counts in.

    It is a chat (`messages`) or a text to go on with (`prompt`), up to one of `stop`.
    """

    group: str
    messages: tuple[Mapping[str, Any], ...] = ()
    prompt: str = ""
    stop: tuple[str, ...] = ()
    expected: str
    rule: str  # how an answer is compared with `expected`; its names belong to the task
    tools: tuple[Mapping[str, Any], ...] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


class _Grouped(Protocol):
    @property
    def group(self) -> str: ...


_G = TypeVar("_G", bound=_Grouped)


def first_of_each_group(examples: Sequence[_G], limit: int | None) -> list[_G]:
    """At most `limit` of each, in their order; None: all."""
    taken: dict[str, int] = {}
    found = []
    for one in examples:
        taken[one.group] = taken.get(one.group, 0) + 1
        if limit is None or taken[one.group] <= limit:
            found.append(one)
    return found


@dataclass(frozen=True, slots=True)
class Response:
    """What a model said: apart from it what it thought, and the tools it called."""

    content: str
    reasoning: str = ""
    calls: tuple[Mapping[str, Any], ...] = ()  # {"name", "arguments"} each; {}: not readable


@dataclass(frozen=True, slots=True)
class Task:
    file_name: str  # where a checkpoint folder keeps the task's examples
    max_tokens: int
    read: Callable[[Path], list[Example]]
    is_right: Callable[[Example, Response], bool]


def response_of_text(text: str) -> Response:
    """A whole turn as the model wrote it, with <think> and <tool_call> marks."""
    before, closing, after = text.partition("</think>")
    thought, said = (before.partition("<think>")[2], after) if closing else ("", text)
    calls = tuple(_call(parsed(call)) for call in _CALL.findall(said))
    return Response(_CALL.sub("", said).strip(), thought.strip(), calls)


def response_of_output(output: CompletionOutput) -> Response:
    """A sample of `LLM.chat`, which takes the marks out that it knows of."""
    calls = tuple(
        {"name": call.name, "arguments": parsed(call.arguments)} for call in output.tool_calls
    )
    return Response(output.text.strip(), output.reasoning.strip(), calls)


def response_of_message(message: Mapping[str, Any]) -> Response:
    """A message of a chat completion, whether or not the server has taken the marks out."""
    response = response_of_text(message.get("content") or "")
    if thought := message.get("reasoning_content") or message.get("reasoning"):
        response = replace(response, reasoning=thought.strip())
    if calls := message.get("tool_calls"):
        functions = [_call(call["function"]) for call in calls]
        response = replace(response, calls=tuple(functions))
    return response


def _call(call: Any) -> Mapping[str, Any]:
    """Name and arguments; a server sends the arguments as JSON text."""
    if not isinstance(call, Mapping):
        return {}
    arguments = call.get("arguments")
    if not isinstance(arguments, str):
        return call
    return {"name": call.get("name"), "arguments": parsed(arguments)}


def parsed(text: str) -> Any:
    """The JSON value, or None for what is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
