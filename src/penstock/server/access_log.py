"""The access log: one line for each request, written when its response has ended.

Says who asked for what, how it ended, how long it took and how many tokens it had. Never holds a
word of a prompt or an output, nor a query string or a key.
"""

import asyncio
import logging
import time
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock import log
from penstock.server.auth import key_name_of
from penstock.server.generations import Generations

CLIENT_CLOSED_REQUEST = 499  # nobody reads it
_SERVED = "penstock.served"
_QUIET_PATHS = frozenset(  # asked every few seconds by machines
    ("/health", "/health_generate", "/metrics", "/prometheus/metrics")
)
_MAX_PATH_CHARS = 256
_log = log.get("penstock.access")


@dataclass(slots=True)
class Served:
    """What an endpoint tells of the request under way."""

    request_id: str = ""
    generations: Generations | None = None


def tell_access_log(scope: Scope, request_id: str, generations: Generations) -> None:
    """`generations` are read when the response has ended, however it ends."""
    served: Served | None = scope.get(_SERVED)
    if served is not None:
        served.request_id = request_id
        served.generations = generations


class AccessLog:
    """ASGI middleware; the outermost, so that refusals are seen too."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        level = logging.DEBUG if scope["path"].rstrip("/") in _QUIET_PATHS else logging.INFO
        if scope["type"] != "http" or not _log.isEnabledFor(level):
            await self._app(scope, receive, send)
            return
        begun_at = time.monotonic()
        served = scope[_SERVED] = Served()
        status, is_whole = 0, False

        async def watch(message: Message) -> None:
            nonlocal status, is_whole
            if message["type"] == "http.response.start":
                status = message["status"]
            elif not message.get("more_body", False):
                is_whole = True
            await send(message)

        try:
            await self._app(scope, receive, watch)
            if not is_whole:
                status = CLIENT_CLOSED_REQUEST
        except asyncio.CancelledError:
            status = 503  # the server is leaving
            raise
        except Exception:
            status = 500
            raise
        finally:
            duration_s = time.monotonic() - begun_at
            # Not by `log`, which walks the stack to find out who calls.
            line = _line(scope, status, duration_s, served)
            _log.handle(_log.makeRecord(_log.name, level, "", 0, line, (), None))


def _line(scope: Scope, status: int, duration_s: float, served: Served) -> str:
    line = f"{scope['method']} {_path(scope)} {status} {duration_s * 1e3:.1f}ms"
    if (generations := served.generations) is not None:
        line += (
            f" prompt_tokens={generations.num_prompt_tokens}"
            f" completion_tokens={generations.num_generated_tokens}"
            f" finish={generations.finish} id={served.request_id}"
        )
    if (client := scope.get("client")) is not None:
        line += f" client={client[0]}:{client[1]}"
    if (key_name := key_name_of(scope)) is not None:
        line += f" key={key_name}"
    return line


def _path(scope: Scope) -> str:
    """As it was sent: what it stands for may hold a line end."""
    raw = scope.get("raw_path") or scope["path"].encode("utf-8", "backslashreplace")
    text = raw[:_MAX_PATH_CHARS].decode("ascii", "backslashreplace")
    return text if text.isprintable() else repr(text)
