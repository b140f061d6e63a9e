"""`RequestGuard`: which requests may come in at all, judged by their head.

Keeps web pages of other sites out, which a browser on this machine lets send requests: those under
a host name that is not ours (DNS rebinding), and posts that browsers send without asking first.
Sends everybody away once the server is leaving. Keys are not its business.
"""

import asyncio
import ipaddress

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.config.http import HttpConfig
from penstock.server.drain import Drain
from penstock.server.errors import ErrorBody

RETRY_AFTER_S = 1
_OPEN_WHILE_LEAVING = frozenset(("/metrics", "/prometheus/metrics", "/version"))
# What a page may post to another site without the browser asking that site first. A body without a
# type counts: `fetch` sends one so.
_SIMPLE_TYPES = frozenset(
    (b"", b"text/plain", b"application/x-www-form-urlencoded", b"multipart/form-data")
)
_MAX_SKIPPED_BYTES = 1 << 20
_SKIP_TIMEOUT_S = 1.0


class RequestGuard:
    """`host`: the address the server listens on."""

    def __init__(self, app: ASGIApp, host: str, config: HttpConfig, drain: Drain) -> None:
        self._app = app
        self._drain = drain
        self._names: frozenset[str] | None = None  # beside addresses and localhost; None: any
        self._last_allowed = b""  # clients say the same over and over; to look takes 12 us
        if config.allowed_hosts is not None:
            names = frozenset(one.lower() for one in config.allowed_hosts)
            self._names = None if "*" in names else names
        elif is_loopback(host):
            self._names = frozenset()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._refusal(scope) if scope["type"] == "http" else None
        if error is None:
            await self._app(scope, receive, send)
            return
        # The connection ends; with bytes unread it would end in a reset, which may overtake us.
        await _skip_body(receive)
        headers = error.headers | {"connection": "close"}
        body = error.encoded(scope["path"])
        response = Response(body, error.status, headers, media_type="application/json")
        await response(scope, receive, send)

    def _refusal(self, scope: Scope) -> ErrorBody | None:
        if self._drain.is_begun and scope["path"] not in _OPEN_WHILE_LEAVING:
            headers = {"retry-after": str(RETRY_AFTER_S)}
            return ErrorBody(503, "shutting_down", "the server is shutting down", headers=headers)
        headers_of = dict(scope["headers"])
        host = headers_of.get(b"host", b"")
        if self._names is not None and host and not self._may_be_called(host):
            said = host.decode("latin-1")[:256]
            return ErrorBody(
                403,
                "host_not_allowed",
                f"this server is not called {said!r}; add the name to http_config.allowed_hosts",
            )
        if scope["method"] == "POST" and _is_from_elsewhere(headers_of, host):
            return ErrorBody(
                403,
                "cross_site",
                "a page of another site may not send this; send Content-Type: application/json",
            )
        return None

    def _may_be_called(self, host: bytes) -> bool:
        if host == self._last_allowed:
            return True
        name = _without_port(host)
        is_local = name == "localhost" or name.endswith(".localhost")
        if not (is_local or name in (self._names or ()) or _is_address(name)):
            return False
        self._last_allowed = host
        return True


def is_loopback(host: str) -> bool:
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _without_port(host: bytes) -> str:
    text = host.decode("latin-1").lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0].rstrip(".")


def _is_from_elsewhere(headers: dict[bytes, bytes], host: bytes) -> bool:
    """By a browser that did not ask first. Other clients send neither of these headers."""
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if kind not in _SIMPLE_TYPES:
        return False
    if (site := headers.get(b"sec-fetch-site")) is not None:
        return site not in (b"same-origin", b"none")
    origin = headers.get(b"origin")
    return origin is not None and origin.partition(b"://")[2].lower() != host.lower()


async def _skip_body(receive: Receive) -> None:
    num_bytes = 0
    try:
        async with asyncio.timeout(_SKIP_TIMEOUT_S):
            while num_bytes < _MAX_SKIPPED_BYTES:
                message = await receive()
                num_bytes += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return
    except TimeoutError:
        pass
