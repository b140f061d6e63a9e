"""`build_app`: routes and middleware around a running pipeline; `launch` starts and stops it."""

import hmac
from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.config.schema import EngineConfig
from penstock.errors import PenstockError
from penstock.frontend.pipeline import GenerationPipeline
from penstock.metrics.events import RequestRefused
from penstock.server import health
from penstock.server.board import Board
from penstock.server.errors import error_response, explain, on_bug
from penstock.server.openai.chat import chat_completions
from penstock.server.openai.completions import completions
from penstock.server.openai.models import models
from penstock.server.openai.tokenize import detokenize, tokenize
from penstock.server.sse import ClientGone
from penstock.server.state import Choice, server_state, state_of

_OPEN_PATHS = frozenset(("/health",))  # a load balancer has no key
_CLIENT_CLOSED_REQUEST = 499  # nobody reads it


def build_app(
    pipeline: GenerationPipeline,
    config: EngineConfig,
    board: Board | None = None,
    choices: Sequence[Choice] = (),
) -> Starlette:
    """`board`: shared with the server's other front ends. `choices`: made by it, not the engine."""
    guard = [] if config.api_key is None else [Middleware(ApiKeyGuard, key=config.api_key)]
    app = Starlette(
        routes=[
            Route("/health", health.health),
            Route("/health_generate", health.health_generate),
            Route("/version", health.version),
            Route("/metrics", health.metrics),
            Route("/prometheus/metrics", health.prometheus_metrics),
            Route("/v1/models", models),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/chat/completions", chat_completions, methods=["POST"]),
            Route("/tokenize", tokenize, methods=["POST"]),
            Route("/detokenize", detokenize, methods=["POST"]),
        ],
        middleware=guard,
        exception_handlers={
            PenstockError: _on_refusal,
            HTTPException: _on_refusal,
            ClientGone: _on_client_gone,
            Exception: on_bug,
        },
    )
    app.router.redirect_slashes = False
    app.state.server = server_state(pipeline, config, board, choices)
    return app


async def _on_refusal(request: Request, error: Exception) -> Response:
    state_of(request).metrics.observe(RequestRefused(explain(error).status))
    return error_response(error)


async def _on_client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=_CLIENT_CLOSED_REQUEST)


class ApiKeyGuard:
    """Lets a request pass only with `Authorization: Bearer <key>`."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in _OPEN_PATHS:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                refusal = HTTPException(
                    401, "the API key is missing or wrong", {"www-authenticate": "Bearer"}
                )
                await error_response(refusal)(scope, receive, send)
                return
        await self._app(scope, receive, send)
