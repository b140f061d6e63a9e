"""A text delta as pieces in the order they are told: reasoning, text, then tool calls, each whole
before the next begins. For APIs whose output is a list of items or blocks.
"""

from collections.abc import Sequence

import msgspec

from penstock.types.outputs import TextDelta, ToolCallDelta


class Reasoning(msgspec.Struct, frozen=True, gc=False):
    text: str


class Words(msgspec.Struct, frozen=True, gc=False):
    text: str


Piece = Reasoning | Words | ToolCallDelta


def pieces_of(delta: TextDelta, max_calls: int | None = None) -> Sequence[Piece]:
    """`max_calls`: further ones are left out."""
    said: list[Piece] = []
    if delta.reasoning:
        said.append(Reasoning(delta.reasoning))
    if delta.text:
        said.append(Words(delta.text))
    if not delta.tool_calls:
        return said
    calls = [one for one in delta.tool_calls if max_calls is None or one.index < max_calls]
    # The rest of a call that has begun was written before the text that came with it.
    num_before = 1 if calls and not calls[0].name else 0
    return [*calls[:num_before], *said, *calls[num_before:]]
