"""Paths as clients write them: a slash at the end of one means nothing."""

from starlette.types import ASGIApp, Receive, Scope, Send


class TrailingSlash:
    """ASGI middleware. Not a redirect: a client may send its body only once."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path.endswith("/") and path != "/":
            scope["path"] = path.rstrip("/") or "/"
        await self._app(scope, receive, send)
