"""Requests of other APIs are checked by `ChatRequest`: what chat refuses is refused there, too.

A body is written as chat's, checked, and what is wrong is told in the words of the API asked.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from penstock.errors import RequestError
from penstock.server.openai.requests.chat import ChatRequest
from penstock.server.openai.requests.schema import Strict, parse, shown


def parse_chat(body: Mapping[str, Any], names: Mapping[str, str]) -> ChatRequest:
    """`names`: of chat's fields -> how the API calls them; of one within another first."""
    with told_as(names):
        return parse(ChatRequest, {key: value for key, value in body.items() if value is not None})


@contextmanager
def told_as(names: Mapping[str, str]) -> Iterator[None]:
    """A `RequestError` about a field of chat becomes one about the field it was made from."""
    try:
        yield
    except RequestError as error:
        raise RequestError(error.code, *_renamed(error, names)) from None


def _renamed(error: RequestError, names: Mapping[str, str]) -> tuple[str, str | None]:
    message, param = error.message, error.param
    for chats, name in names.items():
        word = rf"{re.escape(chats)}\b"
        if param is not None:
            param = re.sub(rf"^{word}", name, param)
        # Within a sentence only what can be no word of it, as "messages" may be.
        place = rf"\b{word}" if "_" in chats else rf"^{word}(?= is |\[|\.)"
        message = re.sub(place, name, message)
    return message, param


def refuse_unsupported(asked: Strict, reasons: Mapping[str, str]) -> None:
    """Fields that are known but ask for something that is not there."""
    for name, why in reasons.items():
        value = getattr(asked, name)
        if value is not None and value != type(asked).model_fields[name].default:
            raise RequestError("unsupported", f"{name} is {shown(value)}: {why}", name)


def text_of(content: Any, kinds: Mapping[str, str], where: str) -> str:
    """A text, or a list of parts; `kinds`: the parts that hold text -> the name of that text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(
            "invalid_type",
            f"{where} must be a text or a list of parts, it is {shown(content)}",
            where,
        )
    return "\n".join(part_text(part, kinds, f"{where}[{i}]") for i, part in enumerate(content))


def part_text(part: Any, kinds: Mapping[str, str], where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise RequestError(
            "invalid_type", f"{where} must be an object with a type, it is {shown(part)}", where
        )
    if kind not in kinds:
        raise RequestError(
            "unsupported",
            f"{where}.type is {shown(kind)}: only text is supported here ({', '.join(kinds)})",
            where,
        )
    text = part.get(kinds[kind])
    if not isinstance(text, str):
        raise RequestError(
            "invalid_type", f"{where}.{kinds[kind]} must be a text, it is {shown(text)}", where
        )
    return text


def text_field(item: Mapping[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise RequestError(
            "invalid_type",
            f"{where}.{name} must be a text, it is {shown(value)}",
            f"{where}.{name}",
        )
    return value
