"""`build_app`: routes and middleware around a running pipeline; `launch` starts and stops it."""

import asyncio
from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.config.schema import EngineConfig
from penstock.frontend.pipeline import GenerationPipeline
from penstock.server import health
from penstock.server.access_log import AccessLog
from penstock.server.adapters import load_lora_adapter, unload_lora_adapter
from penstock.server.anthropic.messages import count_tokens, create_message
from penstock.server.auth import ApiKeyGuard
from penstock.server.batches.service import batch_service
from penstock.server.drain import Drain
from penstock.server.front_page import favicon, front_page
from penstock.server.openai import batches, files
from penstock.server.openai.chat import chat_completions
from penstock.server.openai.completions import completions
from penstock.server.openai.models import model, models
from penstock.server.openai.pooling import embeddings, rerank, score
from penstock.server.openai.responses import endpoints as responses
from penstock.server.openai.responses.service import response_service
from penstock.server.openai.tokenize import detokenize, tokenize
from penstock.server.openapi.page import docs, openapi_json
from penstock.server.paths import TrailingSlash
from penstock.server.refusals import EXCEPTION_HANDLERS
from penstock.server.request_guard import RequestGuard
from penstock.server.shared_state import SharedState
from penstock.server.state import server_state
from penstock.server.tenants import Access
from penstock.types.setting_choice import SettingChoice


def build_app(
    pipeline: GenerationPipeline,
    config: EngineConfig,
    shared: SharedState | None = None,
    choices: Sequence[SettingChoice] = (),
    drain: Drain | None = None,
    access: Access | None = None,
) -> Starlette:
    """`shared`: with the server's other API servers. `choices`: made by it, not the engine.
    `drain`: whether the server is leaving. `access`: None where this is the only API server."""
    access = Access.load(config) if access is None else access
    drain = drain or Drain()
    app = Starlette(
        routes=[  # tried one after the other, so those that are asked most come first
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/chat/completions", chat_completions, methods=["POST"]),
            Route("/v1/messages", create_message, methods=["POST"]),
            Route("/v1/responses", responses.create_response, methods=["POST"]),
            Route("/v1/embeddings", embeddings, methods=["POST"]),
            *(Route(path, score, methods=["POST"]) for path in ("/v1/score", "/score")),
            *(
                Route(path, rerank, methods=["POST"])
                for path in ("/v1/rerank", "/v2/rerank", "/rerank")
            ),
            Route("/", front_page),
            Route("/favicon.ico", favicon),
            Route("/openapi.json", openapi_json),
            Route("/docs", docs),
            Route("/health", health.health),
            Route("/health_generate", health.health_generate),
            Route("/version", health.version),
            Route("/metrics", health.metrics),
            Route("/prometheus/metrics", health.prometheus_metrics),
            Route("/v1/models", models),
            Route("/v1/models/{model:path}", model),
            Route("/v1/load_lora_adapter", load_lora_adapter, methods=["POST"]),
            Route("/v1/unload_lora_adapter", unload_lora_adapter, methods=["POST"]),
            Route("/tokenize", tokenize, methods=["POST"]),
            Route("/detokenize", detokenize, methods=["POST"]),
            Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
            Route("/v1/responses/{response_id}", responses.get_response),
            Route("/v1/responses/{response_id}", responses.delete_response, methods=["DELETE"]),
            Route(
                "/v1/responses/{response_id}/cancel", responses.cancel_response, methods=["POST"]
            ),
            Route("/v1/responses/{response_id}/input_items", responses.list_input_items),
            Route("/v1/files", files.upload_file, methods=["POST"]),
            Route("/v1/files", files.list_files),
            Route("/v1/files/{file_id}", files.get_file),
            Route("/v1/files/{file_id}", files.delete_file, methods=["DELETE"]),
            Route("/v1/files/{file_id}/content", files.file_content),
            Route("/v1/batches", batches.create_batch, methods=["POST"]),
            Route("/v1/batches", batches.list_batches),
            Route("/v1/batches/{batch_id}", batches.get_batch),
            Route("/v1/batches/{batch_id}/cancel", batches.cancel_batch, methods=["POST"]),
        ],
        middleware=_middleware(config, drain, access),
        exception_handlers=EXCEPTION_HANDLERS,
    )
    app.router.redirect_slashes = False
    app.state.server = server_state(pipeline, config, shared, choices, access.has_keys)
    app.state.responses = response_service(config, shared)
    app.state.batches = batch_service(app.state.server, config, drain, access)
    return app


def _middleware(config: EngineConfig, drain: Drain, access: Access) -> list[Middleware]:
    """Outermost first. A browser asks whether it may (CORS) before it sends a key."""
    http = config.http_config
    layers = [Middleware(AccessLog)] if http.access_log else []
    layers += [Middleware(PanicGuard), Middleware(TrailingSlash)]
    if http.allowed_origins:
        layers.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(http.allowed_origins),
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
            )
        )
    layers.append(Middleware(RequestGuard, host=config.host, config=http, drain=drain))
    return [*layers, Middleware(ApiKeyGuard, access=access)]


class PanicGuard:
    """What is no `Exception`, such as a panic of a library in Rust, becomes one: a request's bug,
    answered like any other. Else it would pass everything that turns bugs into responses.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except (Exception, KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError):
            raise
        except BaseException as panic:
            raise RuntimeError(f"{type(panic).__name__}: {panic}") from panic
