"""`Access`: the tenants of a server, one per API key, and how a key is told from another.

Read once, by the first API server. Keys are kept as keyed digests alone; what a tenant may have is
in `Tenant`. Light: it is imported before the engine is started.
"""

import hashlib
import hmac
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Self

from penstock.config.api_keys import NamedKey, read_keys, read_secret
from penstock.config.schema import EngineConfig
from penstock.types.tenant import ANONYMOUS, Tenant


class Access:
    """The tenants of a server and how they are told apart; `digests` is empty where nobody is."""

    def __init__(self, tenants: Sequence[Tenant], pepper: bytes, digests: Mapping[bytes, int]):
        self.tenants = tuple(tenants)
        self._pepper = pepper
        self._digests = dict(digests)

    @classmethod
    def load(cls, config: EngineConfig) -> Self:
        """Reads the files of keys and of the secret; `ConfigError` where they cannot be used."""
        keys, secret = read_keys(config), read_secret(config) or secrets.token_bytes(32)
        pepper = secrets.token_bytes(32)
        if not keys:
            may_set_priority = config.access_config.allow_priority
            return cls([replace(ANONYMOUS, may_set_priority=may_set_priority)], pepper, {})
        is_open = config.access_config.prefix_sharing == "open"
        tenants = [_tenant(i, key, secret, is_open) for i, key in enumerate(keys)]
        digests = {_digest(pepper, key.entry.key.encode()): i for i, key in enumerate(keys)}
        return cls(tenants, pepper, digests)

    @property
    def has_keys(self) -> bool:
        return bool(self._digests)

    def find(self, headers: Sequence[tuple[bytes, bytes]]) -> Tenant | None:
        """By the one Authorization or the one X-Api-Key header, or both where they agree. Equal
        keys are found by digests under a random key of this process, so that no time that is spent
        here tells anything about a key."""
        given = [header for header in headers if header[0] in _KEY_HEADERS]
        found = {self._digests.get(_digest(self._pepper, _key(*header))) for header in given}
        index = found.pop() if len(found) == 1 else None
        if index is None or len({name for name, _ in given}) != len(given):
            return None
        return self.tenants[index]

    def to_task(self) -> dict[str, Any]:
        """For a further API server: no key is in it."""
        return {
            "tenants": [asdict(tenant) for tenant in self.tenants],
            "pepper": self._pepper.hex(),
            "digests": {digest.hex(): index for digest, index in self._digests.items()},
        }

    @classmethod
    def from_task(cls, task: Mapping[str, Any]) -> Self:
        return cls(
            [Tenant(**tenant) for tenant in task["tenants"]],
            bytes.fromhex(task["pepper"]),
            {bytes.fromhex(digest): index for digest, index in task["digests"].items()},
        )


def _tenant(index: int, key: NamedKey, secret: bytes, is_open: bool) -> Tenant:
    entry = key.entry
    group = "key", key.name
    if entry.cache_group is not None:
        group = "group", entry.cache_group
    # The two kinds of names differ in their first byte, so a key is never taken for a group.
    said = "\0".join(group).encode()
    scope = hmac.new(secret, said, hashlib.sha256).hexdigest()
    return Tenant(
        index=index,
        name=key.name,
        weight=entry.weight,
        may_set_priority=entry.allow_priority,
        may_read_metrics=entry.allow_metrics,
        max_queued_requests=entry.max_queued_requests,
        max_queued_tokens=entry.max_queued_tokens,
        prefix_scope=None if is_open else scope,
        salt_scope=scope,
    )


_KEY_HEADERS = (b"authorization", b"x-api-key")


def _key(name: bytes, value: bytes) -> bytes:
    """Nobody's, where it is not given as a bearer's."""
    if name == b"authorization":
        scheme, _, value = value.partition(b" ")
        value = value if scheme.lower() == b"bearer" else b""
    return value.strip(b" ")


def _digest(pepper: bytes, key: bytes) -> bytes:
    return hmac.new(pepper, key, hashlib.sha256).digest()
