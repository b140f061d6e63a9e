"""A text delta as pieces in the order they are told: reasoning, text, then tool calls, each whole
before the next begins. For APIs whose output is a list of items or blocks."""

from collections.abc import Iterator
from dataclasses import dataclass

from penstock.types.outputs import TextDelta, ToolCallDelta


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class Words:
    text: str


Piece = Reasoning | Words | ToolCallDelta


def pieces_of(delta: TextDelta, max_calls: int | None = None) -> Iterator[Piece]:
    """`max_calls`: further ones are left out."""
    calls = [one for one in delta.tool_calls if max_calls is None or one.index < max_calls]
    if calls and not calls[0].name:
        # The rest of a call that has begun: it was written before the text that came with it.
        yield calls.pop(0)
    if delta.reasoning:
        yield Reasoning(delta.reasoning)
    if delta.text:
        yield Words(delta.text)
    yield from calls
