"""`BlockWriter`: text deltas of one sample -> content blocks and the events that tell of them.

One block after the other: thinking, text, a tool use each; as `responses/output_writer` has it.
"""

from collections.abc import Iterator
from typing import Any

from pydantic_core import from_json

from penstock.server.anthropic.reply import (
    Block,
    BlockDelta,
    BlockEvent,
    BlockInputDelta,
    BlockStart,
    BlockStop,
    BlockTextDelta,
    BlockThinkingDelta,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
)
from penstock.server.output_pieces import Piece, Reasoning, Words, pieces_of
from penstock.types.outputs import TextDelta, ToolCallDelta
from penstock.types.request import FinishReason


class BlockWriter:
    """`max_calls`: further tool calls are left out; `shows_thinking`: False leaves that out."""

    def __init__(self, max_calls: int | None = None, shows_thinking: bool = True) -> None:
        self.blocks: list[Block] = []  # those that are done
        self._max_calls = max_calls
        self._shows_thinking = shows_thinking
        self._first: Piece | None = None  # of the block that is open
        self._parts: list[str] = []

    @property
    def has_called(self) -> bool:
        return any(isinstance(block, ToolUseBlock) for block in self.blocks)

    def push(self, delta: TextDelta) -> list[BlockEvent]:
        events: list[BlockEvent] = []
        for piece in pieces_of(delta, self._max_calls):
            if isinstance(piece, Reasoning) and not self._shows_thinking:
                continue
            if not self._goes_on(piece):
                events += self._close()
                events.append(self._open(piece))
            events += self._add(piece)
        if delta.finish is not None:
            events += self._close()
            if not self.blocks and delta.finish is FinishReason.STOP:
                events.append(self._open(Words("")))
                events += self._close()
        return events

    def _goes_on(self, piece: Piece) -> bool:
        first = self._first
        if isinstance(first, ToolCallDelta):
            return isinstance(piece, ToolCallDelta) and piece.index == first.index
        return first is not None and type(first) is type(piece)

    def _open(self, piece: Piece) -> BlockStart:
        self._first = piece
        self._parts = []
        return BlockStart(index=len(self.blocks), content_block=self._block())

    def _add(self, piece: Piece) -> Iterator[BlockDelta]:
        delta: BlockTextDelta | BlockThinkingDelta | BlockInputDelta
        match piece:
            case Reasoning(text):
                delta = BlockThinkingDelta(thinking=text)
            case Words(text):
                delta = BlockTextDelta(text=text)
            case ToolCallDelta():
                text = piece.arguments
                delta = BlockInputDelta(partial_json=text)
        if text:
            self._parts.append(text)
            yield BlockDelta(index=len(self.blocks), delta=delta)

    def _close(self) -> Iterator[BlockStop]:
        if self._first is not None:
            self.blocks.append(self._block())
            self._first = None
            yield BlockStop(index=len(self.blocks) - 1)

    def _block(self) -> Block:
        text = "".join(self._parts)
        match self._first:
            case Reasoning():
                return ThinkingBlock(thinking=text)
            case ToolCallDelta() as call:
                return ToolUseBlock(id=call.id, name=call.name, input=_input(text))
        return TextBlock(text=text)


def _input(arguments: str) -> dict[str, Any]:
    """What can be read of a call's arguments: an output may have been cut within them."""
    try:
        value = from_json(arguments, allow_partial=True)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
