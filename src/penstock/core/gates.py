"""Admission gates: reasons for a waiting request to let others pass, as injected objects."""

from collections.abc import Callable
from typing import Protocol

from penstock.types.request import Request


class Gate(Protocol):
    def ready(self, request: Request) -> bool:
        """Whether it may start. A `RequestError` ends the request with its message."""


class LeaderGate:
    """Further samples of one prompt wait until the first has filled the cache they will share."""

    def __init__(self, has_prefilled: Callable[[int], bool]) -> None:
        self._has_prefilled = has_prefilled

    def ready(self, request: Request) -> bool:
        return request.leader is None or self._has_prefilled(request.leader)
