"""`Tenant`: on whose behalf a request comes, and what that one may have. Holds no secret."""

from dataclasses import dataclass

PROBE = -1  # tenant of health checks: a line and a few places of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """`index` is its place among the server's tenants, equal in all API servers."""

    index: int = 0
    name: str = "anonymous"
    weight: float = 1.0  # share against others that wait
    may_set_priority: bool = False
    may_read_metrics: bool = True
    max_queued_requests: int | None = None
    max_queued_tokens: int | None = None
    # Prefix blocks are shared within a scope. None: with everybody who has none.
    prefix_scope: str | None = None
    salt_scope: str | None = None  # the scope of requests that bring a `cache_salt`


ANONYMOUS = Tenant()
HEALTH_CHECK = Tenant(index=PROBE, name="health check")
