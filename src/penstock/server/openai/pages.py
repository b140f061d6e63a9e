"""Pages of a list, as OpenAI's clients ask for them: `limit`, `after`, `order`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from starlette.requests import Request

from penstock.errors import RequestError

MAX_ENTRIES = 10_000


class HasId(Protocol):
    id: str


T = TypeVar("T", bound=HasId)


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    entries: list[T]
    has_more: bool

    @property
    def first_id(self) -> str | None:
        return self.entries[0].id if self.entries else None

    @property
    def last_id(self) -> str | None:
        return self.entries[-1].id if self.entries else None


def page_of(
    request: Request, newest_first: Sequence[T], known: Sequence[str], limit: int = MAX_ENTRIES
) -> Page[T]:
    """`known`: what the query may hold; `limit`: where it names none."""
    query = request.query_params
    for name in query:
        if name not in known:
            raise RequestError("unknown_field", f"unknown parameter '{name[:80]}'", name[:80])
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise RequestError("invalid_value", "order must be asc or desc", "order")
    given = query.get("limit", str(limit))
    if not (given.isascii() and given.isdigit() and 1 <= int(given[:9]) <= MAX_ENTRIES):
        raise RequestError("invalid_value", f"limit must be 1 to {MAX_ENTRIES}", "limit")
    entries = list(newest_first) if order == "desc" else list(reversed(newest_first))
    if (after := query.get("after")) is not None:
        place = next((i for i, one in enumerate(entries) if one.id == after), None)
        if place is None:
            raise RequestError("invalid_value", f"after is '{after[:80]}', no entry", "after")
        entries = entries[place + 1 :]
    return Page(entries[: int(given)], has_more=len(entries) > int(given))
