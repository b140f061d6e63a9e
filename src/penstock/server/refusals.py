"""What an application answers to the errors of its endpoints, and counts."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from penstock.errors import PenstockError
from penstock.metrics.events import RequestRefused
from penstock.server.access_log import CLIENT_CLOSED_REQUEST
from penstock.server.errors import error_response, explain, on_bug
from penstock.server.sse import ClientGone
from penstock.server.state import state_of


async def _on_refusal(request: Request, error: Exception) -> Response:
    state_of(request).metrics.observe(RequestRefused(explain(error).status))
    return error_response(error, request.scope["path"])


async def _on_client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


EXCEPTION_HANDLERS: Mapping[Any, Callable[[Request, Exception], Awaitable[Response]]] = {
    PenstockError: _on_refusal,
    HTTPException: _on_refusal,
    ClientGone: _on_client_gone,
    Exception: on_bug,
}
