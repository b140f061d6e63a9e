"""Messages and tools of the Messages API -> those of a chat request.

Blocks of one message of the assistant are one message there: words, reasoning, tool calls. Results
of tools, which a user's message holds here, are messages of their own there.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from penstock.errors import RequestError, did_you_mean
from penstock.server.openai.requests.schema import shown
from penstock.server.openai.requests.through_chat import part_text, text_field, text_of

_TEXT = {"text": "text"}
_TOOL_FIELDS = (
    *("name", "description", "input_schema", "type", "strict", "cache_control"),
    "eager_input_streaming",
)


def chat_messages(system: Any, messages: Sequence[Any]) -> list[dict[str, Any]]:
    chat: list[dict[str, Any]] = []
    if system is not None:
        _check_marks(system, "system")
        chat.append({"role": "system", "content": text_of(system, _TEXT, "system")})
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        role = message.get("role") if isinstance(message, dict) else None
        content = message.get("content") if isinstance(message, dict) else None
        _check_marks(content, f"{where}.content")
        match role:
            case "user":
                chat += _of_user(content, f"{where}.content")
            case "assistant":
                chat.append(_of_assistant(content, f"{where}.content"))
            case "system":
                words = text_of(content, _TEXT, f"{where}.content")
                chat.append({"role": "system", "content": words})
            case _:
                raise RequestError(
                    "invalid_value",
                    f"{where}.role is {shown(role)}, it must be user, assistant or system",
                    f"{where}.role",
                )
    return chat


def check_cache_control(mark: Any, where: str) -> None:
    """Anthropic's end of a prefix to keep. Every prefix is kept here while there is room, so a mark
    changes nothing, but one that says something else is not passed over."""
    if not isinstance(mark, dict):
        raise RequestError("invalid_type", f"{where} must be an object, it is {shown(mark)}", where)
    for name, allowed in (("type", ("ephemeral",)), ("ttl", (None, "5m", "1h"))):
        if mark.get(name) not in allowed:
            words = " or ".join(one for one in allowed if one)
            raise RequestError(
                "invalid_value",
                f"{where}.{name} is {shown(mark.get(name))}, it must be {words}",
                f"{where}.{name}",
            )
    for name in mark.keys() - {"type", "ttl"}:
        said = f"unknown field '{where}.{name[:80]}'{did_you_mean(name, ('type', 'ttl'))}"
        raise RequestError("unknown_field", said, f"{where}.{name[:80]}")


def _check_marks(content: Any, where: str) -> None:
    for index, block in enumerate(content if isinstance(content, list) else ()):
        if not isinstance(block, dict):
            continue
        if block.get("cache_control") is not None:
            check_cache_control(block["cache_control"], f"{where}[{index}].cache_control")
        if block.get("type") == "tool_result":
            _check_marks(block.get("content"), f"{where}[{index}].content")


def _of_user(content: Any, where: str) -> Iterator[dict[str, Any]]:
    if not isinstance(content, list):
        yield {"role": "user", "content": text_of(content, _TEXT, where)}
        return
    words: list[str] = []
    for index, block in enumerate(content):
        place = f"{where}[{index}]"
        if not isinstance(block, dict) or block.get("type") != "tool_result":
            words.append(part_text(block, _TEXT, place))
            continue
        if words:
            yield {"role": "user", "content": "\n".join(words)}
            words = []
        yield {
            "role": "tool",
            "tool_call_id": text_field(block, "tool_use_id", place),
            "content": text_of(block.get("content", ""), _TEXT, f"{place}.content"),
        }
    if words or not content:
        yield {"role": "user", "content": "\n".join(words)}


def _of_assistant(content: Any, where: str) -> dict[str, Any]:
    if not isinstance(content, list):
        return {"role": "assistant", "content": text_of(content, _TEXT, where)}
    words, reasoning, calls = [], [], []
    for index, block in enumerate(content):
        place = f"{where}[{index}]"
        match block.get("type") if isinstance(block, dict) else None:
            case "thinking":
                reasoning.append(text_field(block, "thinking", place))
            case "redacted_thinking":
                raise RequestError(
                    "unsupported",
                    f"{place} is encrypted by another server; leave it out",
                    place,
                )
            case "tool_use":
                calls.append(_call(block, place))
            case _:
                words.append(part_text(block, _TEXT, place))
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(words)}
    if reasoning:
        message["reasoning_content"] = "\n".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(block.get("input"), dict):
        raise RequestError(
            "invalid_type",
            f"{where}.input must be an object, it is {shown(block.get('input'))}",
            f"{where}.input",
        )
    function = {
        "name": text_field(block, "name", where),
        "arguments": json.dumps(block["input"], ensure_ascii=False),
    }
    return {"id": text_field(block, "id", where), "type": "function", "function": function}


def check_tools(value: Any) -> Any:
    for index, tool in enumerate(value if isinstance(value, list) else ()):
        where = f"tools[{index}]"
        if not isinstance(tool, dict):
            raise RequestError("invalid_type", f"{where} must be an object", where)
        if tool.get("type") not in (None, "custom"):
            raise RequestError(
                "unsupported",
                f"{where}.type is {shown(tool['type'])}: only tools of type custom are supported; "
                "what the server would have to run itself is not",
                where,
            )
        for name in tool:
            if name not in _TOOL_FIELDS:
                hint = did_you_mean(name, _TOOL_FIELDS)
                said = f"unknown field '{where}.{name[:80]}'{hint}"
                raise RequestError("unknown_field", said, f"{where}.{name[:80]}")
        if tool.get("cache_control") is not None:
            check_cache_control(tool["cache_control"], f"{where}.cache_control")
        text_field(tool, "name", where)
        if not isinstance(tool.get("input_schema"), dict):
            raise RequestError(
                "missing_field",
                f"{where}.input_schema must be a JSON schema",
                f"{where}.input_schema",
            )
    return value


def chat_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {
        "name": tool["name"],
        "description": tool.get("description"),
        "parameters": tool["input_schema"],
        "strict": tool.get("strict"),
    }
    given = {key: value for key, value in function.items() if value is not None}
    return {"type": "function", "function": given}
