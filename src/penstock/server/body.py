"""Request body -> JSON value, within limits. Any content type will do: `curl -d` names none."""

import asyncio
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from penstock.errors import RequestError
from penstock.server.sse import ClientGone
from penstock.server.state import state_of

MAX_BODY_BYTES = 32 << 20
MAX_JSON_DEPTH = 32


async def read_json(request: Request) -> Any:
    body = await _read(request)
    # One request in a turn of the event loop: what else waits, such as tokens for running streams,
    # comes between two of a burst. 512 prompts of 8192 ids held it up for seconds (2026-11-15).
    async with state_of(request).turn:
        await asyncio.sleep(0)
    return decode_json(body)


async def _read(request: Request) -> bytes:
    announced = request.headers.get("content-length", "0")
    if announced.isascii() and announced.isdigit() and int(announced[:20]) > MAX_BODY_BYTES:
        raise _too_large()
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                raise _too_large()
    except ClientDisconnect:
        raise ClientGone from None
    return bytes(body)


def _too_large() -> HTTPException:
    # Closing the connection spares us from reading the rest.
    return HTTPException(
        413, f"the body is larger than {MAX_BODY_BYTES} bytes", {"connection": "close"}
    )


def decode_json(body: bytes) -> Any:
    if not body.strip():
        raise RequestError("invalid_json", "the body is empty; send a JSON object")
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise _too_deep() from None
    except UnicodeDecodeError as error:
        raise RequestError("invalid_json", f"the body is not valid UTF-8: {error.reason}") from None
    except msgspec.MsgspecError as error:
        raise RequestError("invalid_json", f"the body is not valid JSON: {error}") from None
    _check_depth(value)
    return value


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_JSON_DEPTH + 1):
        level = [
            child
            for parent in level
            if isinstance(parent, dict | list)
            for children in [parent.values() if isinstance(parent, dict) else parent]
            if not {dict, list}.isdisjoint(map(type, children))  # quick for a list of token ids
            for child in children
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> RequestError:
    return RequestError(
        "invalid_json", f"the JSON is nested too deeply; at most {MAX_JSON_DEPTH} levels are read"
    )
