"""Items of the Responses API -> messages as chat has them, and as they are kept.

Reasoning, words and function calls that follow one another are one message of the assistant.
"""

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.errors import RequestError
from penstock.server.openai.requests.schema import shown
from penstock.server.openai.requests.through_chat import text_field, text_of

Item = Mapping[str, Any]
_ROLES = ("user", "assistant", "system", "developer")
_KINDS = ("message", "function_call", "function_call_output", "reasoning")
_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


def kind_of(item: Any, where: str) -> str:
    if not isinstance(item, dict):
        raise RequestError("invalid_type", f"{where} must be an object, it is {shown(item)}", where)
    kind = item.get("type") or ("message" if "role" in item else None)
    if kind == "item_reference":
        raise RequestError(
            "unsupported",
            f"{where} refers to a stored item; send the item itself, or previous_response_id",
            where,
        )
    if kind not in _KINDS:
        raise RequestError(
            "unsupported",
            f"{where}.type is {shown(kind)}, it must be one of {', '.join(_KINDS)}",
            f"{where}.type",
        )
    return str(kind)


def messages_of(given: Sequence[Any], history: Sequence[Item] = ()) -> list[dict[str, Any]]:
    """`history`: items of the conversation before."""
    messages: list[dict[str, Any]] = []
    for index, item in enumerate([*history, *given], start=-len(history)):
        where = f"input[{index}]"
        match kind_of(item, where):
            case "message":
                _add_message(messages, item, where)
            case "reasoning":
                reasoning = _reasoning(item, where)
                messages.append(
                    {"role": "assistant", "content": "", "reasoning_content": reasoning}
                )
            case "function_call":
                function = {
                    "name": text_field(item, "name", where),
                    "arguments": text_field(item, "arguments", where),
                }
                call = {"id": text_field(item, "call_id", where), "type": "function"}
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": ""})
                messages[-1].setdefault("tool_calls", []).append({**call, "function": function})
            case "function_call_output":
                content = text_of(item.get("output"), _PARTS, f"{where}.output")
                call_id = text_field(item, "call_id", where)
                messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
    return messages


def _add_message(messages: list[dict[str, Any]], item: Item, where: str) -> None:
    role = item.get("role")
    if role not in _ROLES:
        raise RequestError(
            "invalid_value",
            f"{where}.role is {shown(role)}, it must be one of {', '.join(_ROLES)}",
            f"{where}.role",
        )
    content = text_of(item.get("content"), _PARTS, f"{where}.content")
    if role == "assistant" and messages and _is_reasoning_alone(messages[-1]):
        messages[-1]["content"] = content
    else:
        messages.append({"role": role, "content": content})


def _is_reasoning_alone(message: Item) -> bool:
    return "reasoning_content" in message and not message["content"] and "tool_calls" not in message


def _reasoning(item: Item, where: str) -> str:
    if content := item.get("content"):
        return text_of(content, {"reasoning_text": "text", "text": "text"}, f"{where}.content")
    if item.get("encrypted_content"):
        raise RequestError(
            "unsupported",
            f"{where}.encrypted_content is another server's: this one sends reasoning as it is, in "
            "content; leave the item out",
            f"{where}.encrypted_content",
        )
    return text_of(item.get("summary") or [], {"summary_text": "text"}, f"{where}.summary")


def kept_items(given: str | Sequence[Item]) -> list[dict[str, Any]]:
    """An input as it is kept and shown: every item with its type and an id."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    return [_kept(item) for item in given]


def _kept(item: Item) -> dict[str, Any]:
    kind = item.get("type") or "message"
    kept = {**item, "type": kind}
    if not isinstance(item.get("id"), str):
        kept["id"] = f"{_PREFIXES[kind]}_{uuid.uuid4().hex}"
    if kind == "message" and isinstance(item["content"], str):
        part = "output_text" if item["role"] == "assistant" else "input_text"
        kept["content"] = [{"type": part, "text": item["content"]}]
        if part == "output_text":
            kept["content"][0]["annotations"] = []
    if kind == "message":
        kept.setdefault("status", "completed")
    return kept


_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
}
