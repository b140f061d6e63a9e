"""Skills of a small trained model: short questions with one exact answer each.

The examples lie in `skills.jsonl`, one JSON object per line. Its `match` names the rule that
compares an answer with `expected`; docs/evaluation.md says what each means.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec

from penstock.errors import ConfigError
from penstock.eval.task import Example, Response, Task, parsed

Rule = Callable[[str, Response], bool]

_MAX_FILE_BYTES = 64 * 2**20
_MAX_ANSWER_TOKENS = 128


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    skill: str
    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]
    expected: str
    match: str
    tools: list[dict[str, Any]] = []
    chat_template_kwargs: dict[str, Any] = {}


def read_skills(path: Path) -> list[Example]:
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ConfigError(f"{path} is larger than {_MAX_FILE_BYTES:,} bytes; cut it")
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read the examples: {error}") from None
    examples = [_example(line, f"{path}, line {i}") for i, line in enumerate(lines, 1) if line]
    if not examples:
        raise ConfigError(f"{path} has no examples")
    return examples


def _example(text: bytes, place: str) -> Example:
    try:
        line = msgspec.json.decode(text, type=_Line)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{place}: {error}") from None
    if line.match not in RULES:
        raise ConfigError(f"{place}: match is '{line.match}', it must be one of {', '.join(RULES)}")
    if line.messages[-1].get("role") == "assistant":
        raise ConfigError(f"{place}: the last message is the assistant's; leave its answer out")
    if line.match in _JSON_RULES and parsed(line.expected) is None:
        raise ConfigError(f"{place}: expected is not JSON, as the rule '{line.match}' needs")
    return Example(
        group=line.skill,
        messages=tuple(line.messages),
        expected=line.expected,
        rule=line.match,
        tools=tuple(line.tools),
        template_kwargs=line.chat_template_kwargs,
    )


# --- rules: (expected, answer) -> right or not ----------------------------------------------------


def _is_exact(expected: str, response: Response) -> bool:
    return response.content.strip() == expected


def _follows(mark: str) -> Rule:
    """What comes after the last `mark`, to the end, is the expected text."""

    def is_right(expected: str, response: Response) -> bool:
        _, found, rest = response.content.rpartition(mark)
        return bool(found) and rest.strip() == expected

    return is_right


_is_answer = _follows("Answer:")


def _is_thought_answer(expected: str, response: Response) -> bool:
    return bool(response.reasoning.strip()) and _is_answer(expected, response)


def _is_unthought_answer(expected: str, response: Response) -> bool:
    return not response.reasoning.strip() and _is_answer(expected, response)


def _is_json(expected: str, response: Response) -> bool:
    return bool(parsed(response.content.strip()) == parsed(expected))


def _is_tool_call(expected: str, response: Response) -> bool:
    """Exactly one call, with this name and these arguments."""
    return list(response.calls) == [parsed(expected)]


RULES: dict[str, Rule] = {
    "exact": _is_exact,
    "answer": _is_answer,
    "hashes": _follows("####"),
    "json": _is_json,
    "tool_call": _is_tool_call,
    "thought_answer": _is_thought_answer,
    "unthought_answer": _is_unthought_answer,
}
_JSON_RULES = ("json", "tool_call")

SKILLS = Task(
    file_name="skills.jsonl",
    max_tokens=_MAX_ANSWER_TOKENS,
    read=read_skills,
    is_right=lambda example, response: RULES[example.rule](example.expected, response),
)
