"""Tool calls as they are found in an output: numbered, named once, their arguments in pieces."""

import uuid
from collections.abc import Callable, Iterable

from penstock.types.outputs import ToolCall, ToolCallDelta


def joined(news: Iterable[ToolCallDelta]) -> tuple[ToolCall, ...]:
    """The calls of one sample, whole."""
    by_index: dict[int, list[ToolCallDelta]] = {}
    for delta in news:
        by_index.setdefault(delta.index, []).append(delta)
    return tuple(
        ToolCall(
            id=pieces[0].id,
            name=pieces[0].name,
            arguments="".join(piece.arguments for piece in pieces),
        )
        for pieces in by_index.values()
    )


def _new_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


class Calls:
    """What parsers write calls into; `take` gives the news, one entry per call."""

    def __init__(self, new_id: Callable[[], str] = _new_id) -> None:
        self._new_id = new_id
        self.count = 0
        self._news: list[ToolCallDelta] = []
        self._id = self._name = ""
        self._arguments: list[str] = []

    def begin(self, name: str, call_id: str = "") -> None:
        """`call_id`: the one that the model gave it."""
        self._close_entry()
        self.count += 1
        self._id, self._name = call_id or self._new_id(), name

    def add(self, arguments: str) -> None:
        self._arguments.append(arguments)

    def take(self) -> tuple[ToolCallDelta, ...]:
        self._close_entry()
        news, self._news = tuple(self._news), []
        return news

    def _close_entry(self) -> None:
        if not self._name and not self._arguments:
            return
        self._news.append(
            ToolCallDelta(
                index=self.count - 1,
                id=self._id,
                name=self._name,
                arguments="".join(self._arguments),
            )
        )
        self._id = self._name = ""
        self._arguments = []
