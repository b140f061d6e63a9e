"""`ResponseService`: stored responses of one API server, and those that run in the background."""

from dataclasses import dataclass, field
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request

from penstock.config.schema import EngineConfig
from penstock.server.auth import tenant_of
from penstock.server.openai.responses.background import BackgroundResponses
from penstock.server.openai.responses.store import ResponseStore, TenantResponses
from penstock.server.shared_state import SharedState


@dataclass(frozen=True, slots=True)
class ResponseService:
    store: ResponseStore
    background: BackgroundResponses = field(default_factory=BackgroundResponses)

    async def aclose(self) -> None:
        await self.background.aclose()
        self.store.close()


def response_service(config: EngineConfig, shared: SharedState | None) -> ResponseService:
    """All API servers of a server know the folder of their `shared` state, which goes with it."""
    http = config.http_config
    folder = None if shared is None else Path(shared.path).with_name("responses")
    return ResponseService(
        ResponseStore(folder, http.max_stored_responses, http.max_stored_response_bytes)
    )


def service_of(request: Request) -> ResponseService:
    service: ResponseService = request.app.state.responses
    return service


def stored_of(request: Request) -> TenantResponses:
    store = service_of(request).store
    if not store.is_on:
        raise HTTPException(404, "no responses are stored: http_config.max_stored_responses is 0")
    return store.of_tenant(tenant_of(request).name)
