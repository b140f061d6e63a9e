"""Who asks: `Authorization: Bearer KEY` or `X-Api-Key: KEY` -> `Tenant`, and what a request may
have on its behalf.

What follows from being a tenant happens elsewhere: places in `frontend/capacity`, order in
`core/queue`, sharing of prefixes through `Request.cache_keys`.
"""

from collections.abc import Sequence
from dataclasses import replace

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.config.schema import EngineConfig
from penstock.errors import RequestError
from penstock.frontend.capacity import Capacity, Holdings
from penstock.server.errors import error_response
from penstock.server.tenants import Access
from penstock.types.request import GenerateInput
from penstock.types.tenant import ANONYMOUS, Tenant

_OPEN_PATHS = frozenset(("/health",))  # a load balancer has no key
_METRICS_PATHS = frozenset(("/metrics", "/prometheus/metrics"))
TENANT = "penstock.tenant"  # in the scope of a request


def capacity_of(access: Access, config: EngineConfig, holdings: Holdings | None = None) -> Capacity:
    settings = config.access_config
    return Capacity(
        access.tenants,
        holdings,
        settings.max_request_share,
        settings.reserved_share,
        bounds_tokens=True,
    )


def tenant_of(request: Request) -> Tenant:
    tenant: Tenant = request.scope[TENANT]
    return tenant


def key_name_of(scope: Scope) -> str | None:
    """Whose key a request came with; None where it came without."""
    tenant: Tenant | None = scope.get(TENANT)
    return None if tenant is None or tenant.name == ANONYMOUS.name else tenant.name


def on_behalf(tenant: Tenant, inputs: Sequence[GenerateInput]) -> list[GenerateInput]:
    """The inputs of an HTTP request as the tenant's, where it may ask for them."""
    for one in inputs:
        if one.priority > 0 and not tenant.may_set_priority:
            raise RequestError(
                "priority_not_allowed",
                f"priority is {one.priority}, '{tenant.name}' may send at most 0; leave it out, or "
                "have allow_priority set: for a key of the keys file there, otherwise in "
                "access_config",
                "priority",
            )
    return [one if one.tenant == tenant else replace(one, tenant=tenant) for one in inputs]


class ApiKeyGuard:
    """Lets a request pass only with a known key, where there are keys, and says whose it is."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (refusal := self._refusal(scope)) is not None:
            await error_response(refusal, scope["path"])(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> HTTPException | None:
        path, access = scope["path"], self._access
        if not access.has_keys:
            scope[TENANT] = access.tenants[0]
            return None
        if path in _OPEN_PATHS:
            return None
        tenant = access.find(scope["headers"])
        if tenant is None:
            said, headers = "the API key is missing or wrong", {"www-authenticate": "Bearer"}
            return HTTPException(401, said, headers)
        if path in _METRICS_PATHS and not tenant.may_read_metrics:
            return HTTPException(
                403,
                f"'{tenant.name}' may not read metrics, which are about the requests of all keys; "
                "set allow_metrics for it in the keys file",
            )
        scope[TENANT] = tenant
        return None
