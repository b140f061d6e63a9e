"""The endpoints of a batch, called within the process: the code that answers HTTP requests answers
its lines, too, on behalf of a tenant that is known already.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.server.auth import TENANT
from penstock.server.openai.chat import chat_completions
from penstock.server.openai.completions import completions
from penstock.server.openai.pooling import embeddings
from penstock.server.refusals import EXCEPTION_HANDLERS
from penstock.server.state import ServerState
from penstock.types.tenant import Tenant

if TYPE_CHECKING:
    import httpx

# Larger runs first, and interactive requests are 0: those of a batch wait for them. A line that
# names a priority keeps it.
BATCH_PRIORITY = -1000


def endpoints_app(state: ServerState) -> ASGIApp:
    app = Starlette(
        routes=[
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/chat/completions", chat_completions, methods=["POST"]),
            Route("/v1/embeddings", embeddings, methods=["POST"]),
        ],
        exception_handlers=EXCEPTION_HANDLERS,
    )
    app.state.server = state
    return app


def in_process_client(app: ASGIApp, tenant: Tenant) -> "httpx.AsyncClient":
    import httpx

    async def on_behalf(scope: Scope, receive: Receive, send: Send) -> None:
        scope[TENANT] = tenant
        await app(scope, receive, send)

    transport = httpx.ASGITransport(on_behalf, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://batch", timeout=None)


def with_priority(priority: int) -> Callable[[dict[str, Any]], None]:
    def prepare(body: dict[str, Any]) -> None:
        body.setdefault("priority", priority)

    return prepare
