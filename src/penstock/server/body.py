"""Request body -> what an endpoint makes of it, within limits. Any content type will do: `curl -d`
names none.

Bytes are bounded for one body and for all of them together, values are counted before they are
built, and what takes long happens in a thread, one large body at a time. Knows no schema.
"""

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from penstock.errors import RequestError
from penstock.server.body_limits import SMALL_BYTES, Bodies
from penstock.server.sse import ClientGone
from penstock.server.state import state_of
from penstock.text.json_outline import outline

MAX_JSON_DEPTH = 32
# 4096 messages with their fields, or 1024 tools, are some tens of thousands. To build as many takes
# 40 ms, and Python looks for garbage among lists and objects while it builds them (2026-11-16).
MAX_JSON_TEXTS = 1 << 18
MAX_JSON_LISTS = 1 << 16
_MAX_SHOWN = 80  # characters of a field's path
T = TypeVar("T")


async def read_body(request: Request, build: Callable[[Any], T]) -> T:
    """What `build` makes of the JSON. For a large body it is called in a thread."""
    bodies = state_of(request).bodies
    body = _Body(bodies)
    try:
        data = await body.read(request)
        if len(data) > SMALL_BYTES:
            async with bodies.large_turn:
                return await asyncio.to_thread(lambda: build(decode_json(data, bodies.max_values)))
        # One request in a turn of the event loop: what else waits, such as tokens for running
        # streams, comes between two of a burst. 512 prompts of 8192 ids held it up for seconds
        # (2026-11-15).
        await bodies.turns.take()
        return build(decode_json(data, bodies.max_values))
    finally:
        body.give_back()


class _Body:
    """One body while it is received and decoded."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._num_held_bytes = 0

    async def read(self, request: Request) -> bytearray:
        limits = self._bodies
        announced = request.headers.get("content-length", "0")
        if announced.isascii() and announced.isdigit() and int(announced[:20]) > limits.max_bytes:
            raise limits.too_large()
        encoding = request.headers.get("content-encoding", "identity").lower()
        if encoding != "identity":
            raise RequestError(
                "unsupported_encoding",
                f"Content-Encoding is {encoding[:_MAX_SHOWN]!r}; send the body as it is",
            )
        data = bytearray()
        try:
            async for chunk in request.stream():
                if len(data) + len(chunk) > limits.max_bytes:
                    raise limits.too_large()
                self._hold(len(data) + len(chunk) - SMALL_BYTES)
                data += chunk
        except ClientDisconnect:
            raise ClientGone from None
        return data

    def _hold(self, num_bytes: int) -> None:
        if num_bytes > self._num_held_bytes:
            self._bodies.hold(num_bytes - self._num_held_bytes)
            self._num_held_bytes = num_bytes

    def give_back(self) -> None:
        self._bodies.give_back(self._num_held_bytes)
        self._num_held_bytes = 0


def decode_json(body: bytes | bytearray, max_values: int) -> Any:
    if not body.strip():
        raise RequestError("invalid_json", "the body is empty; send a JSON object")
    _check_outline(body, max_values)
    try:
        return msgspec.json.decode(body)
    except UnicodeDecodeError as error:
        raise RequestError("invalid_json", f"the body is not valid UTF-8: {error.reason}") from None
    except (msgspec.MsgspecError, RecursionError) as error:
        if len(body) <= SMALL_BYTES and (where := _broken_text(body)) is not None:
            raise RequestError(
                "invalid_json",
                f"the body is not valid JSON: {where} holds half of a surrogate pair, which is no "
                "character; send both halves",
                where,
            ) from None
        raise RequestError("invalid_json", f"the body is not valid JSON: {error}") from None


def _check_outline(body: bytes | bytearray, max_values: int) -> None:
    found = outline(body, MAX_JSON_TEXTS)
    if found.depth > MAX_JSON_DEPTH:
        raise RequestError(
            "invalid_json",
            f"the JSON is nested too deeply; at most {MAX_JSON_DEPTH} levels are read",
        )
    for what, number, limit in (
        ("texts", found.num_texts, MAX_JSON_TEXTS),
        ("lists and objects", found.num_lists, MAX_JSON_LISTS),
        ("values", found.num_values, max_values),
    ):
        if number > limit:
            raise RequestError(
                "invalid_json",
                f"the JSON holds {number} {what}, at most {limit} are read; send less at a time",
            )


def _broken_text(body: bytes | bytearray) -> str | None:
    """Which field holds half a surrogate pair, of a small body that is JSON otherwise."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return next(_broken_fields(value, ""), None)


def _broken_fields(value: Any, where: str) -> Iterator[str]:
    if isinstance(value, str):
        if not _is_text(value):
            yield where or "it"
    elif isinstance(value, list):
        for index, one in enumerate(value):
            yield from _broken_fields(one, f"{where}[{index}]")
    elif isinstance(value, dict):
        for key, one in value.items():
            if not _is_text(key):
                yield f"a name in {where or 'it'}"[:_MAX_SHOWN]
            yield from _broken_fields(one, f"{where}.{key}".removeprefix(".")[:_MAX_SHOWN])


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
