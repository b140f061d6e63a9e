"""`OutputWriter`: text deltas of one sample -> output items and the events that tell of them.

One item after the other: reasoning, message, a function call each. A delta that is the whole output
makes the same items as any number of pieces of it, as long as these come in that order, as models
write them; what comes later of an earlier kind is an item of its own in a stream.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from penstock.server.openai.reply import ChatTokenLogprob
from penstock.server.openai.responses.records import (
    ArgumentsDelta,
    ArgumentsDone,
    FunctionCallItem,
    ItemAdded,
    ItemDone,
    MessageItem,
    OutputEvent,
    OutputItem,
    OutputText,
    OutputTextDelta,
    OutputTextDone,
    PartAdded,
    PartDone,
    ReasoningItem,
    ReasoningText,
    ReasoningTextDelta,
    ReasoningTextDone,
    Status,
    new_id,
)
from penstock.server.output_pieces import Piece, Reasoning, Words, pieces_of
from penstock.types.outputs import TextDelta, ToolCallDelta
from penstock.types.request import FinishReason

Number = Callable[[], int]  # of the next event


class OutputWriter:
    """`max_calls`: further tool calls are left out."""

    def __init__(self, max_calls: int | None = None) -> None:
        self.items: list[OutputItem] = []  # those that are done
        self.next_number: Number = itertools.count().__next__  # the response's own events count too
        self._max_calls = max_calls
        self._open: _OpenItem | None = None
        self._logprobs: list[ChatTokenLogprob] = []  # not told yet

    @property
    def reasoning(self) -> str:
        items = (item for item in self.items if isinstance(item, ReasoningItem))
        return "".join(item.content[0].text for item in items)

    def push(
        self, delta: TextDelta, logprobs: Sequence[ChatTokenLogprob] = ()
    ) -> list[OutputEvent]:
        """`logprobs`: of all tokens of the delta; they are told with the next words."""
        self._logprobs += logprobs
        events: list[OutputEvent] = []
        for piece in pieces_of(delta, self._max_calls):
            if self._open is None or not self._open.takes(piece):
                events += self._close("completed")
                self._open = _open(piece, len(self.items), self.next_number)
                events += self._open.begin()
            if isinstance(piece, Words):
                logprobs, self._logprobs = self._logprobs, []
            events += self._open.add(piece, logprobs)
        if delta.finish is not None:
            events += self._finish(delta.finish)
        return events

    def _finish(self, finish: FinishReason) -> Iterator[OutputEvent]:
        if isinstance(self._open, _OpenMessage):
            self._open.logprobs += self._logprobs
        yield from self._close("incomplete" if finish is FinishReason.LENGTH else "completed")
        has_said = any(not isinstance(item, ReasoningItem) for item in self.items)
        if not has_said and finish is FinishReason.STOP:
            self._open = _OpenMessage(len(self.items), self.next_number)  # of no words
            yield from self._open.begin()
            yield from self._close("completed")

    def _close(self, status: Status) -> Iterator[OutputEvent]:
        if self._open is not None:
            item, events = self._open.end(status)
            self._open = None
            self.items.append(item)
            yield from events


class _OpenItem(ABC):
    """Events and items are made whole: none changes after it was told."""

    prefix = ""  # of its id

    def __init__(self, index: int, next_number: Number) -> None:
        self._index = index
        self._next_number = next_number
        self._id = new_id(self.prefix)
        self._parts: list[str] = []

    def _where(self) -> dict[str, Any]:
        number = self._next_number()
        return {"sequence_number": number, "output_index": self._index, "item_id": self._id}

    def _added(self, item: OutputItem) -> ItemAdded:
        return ItemAdded(sequence_number=self._next_number(), output_index=self._index, item=item)

    def _done(self, item: OutputItem) -> ItemDone:
        return ItemDone(sequence_number=self._next_number(), output_index=self._index, item=item)

    @abstractmethod
    def takes(self, piece: Piece) -> bool: ...

    @abstractmethod
    def begin(self) -> list[OutputEvent]: ...

    @abstractmethod
    def add(self, piece: Piece, logprobs: Sequence[ChatTokenLogprob]) -> list[OutputEvent]: ...

    @abstractmethod
    def end(self, status: Status) -> tuple[OutputItem, list[OutputEvent]]: ...


class _OpenReasoning(_OpenItem):
    prefix = "rs"

    def takes(self, piece: Piece) -> bool:
        return isinstance(piece, Reasoning)

    def begin(self) -> list[OutputEvent]:
        item = ReasoningItem(id=self._id, status="in_progress")
        return [self._added(item), PartAdded(**self._where(), part=ReasoningText())]

    def add(self, piece: Piece, logprobs: Sequence[ChatTokenLogprob]) -> list[OutputEvent]:
        assert isinstance(piece, Reasoning), piece
        self._parts.append(piece.text)
        return [ReasoningTextDelta(**self._where(), delta=piece.text)]

    def end(self, status: Status) -> tuple[OutputItem, list[OutputEvent]]:
        part = ReasoningText(text="".join(self._parts))
        item = ReasoningItem(id=self._id, status=status, content=[part])
        return item, [
            ReasoningTextDone(**self._where(), text=part.text),
            PartDone(**self._where(), part=part),
            self._done(item),
        ]


class _OpenMessage(_OpenItem):
    prefix = "msg"

    def __init__(self, index: int, next_number: Number) -> None:
        super().__init__(index, next_number)
        self.logprobs: list[ChatTokenLogprob] = []

    def takes(self, piece: Piece) -> bool:
        return isinstance(piece, Words)

    def begin(self) -> list[OutputEvent]:
        item = MessageItem(id=self._id, status="in_progress")
        return [self._added(item), PartAdded(**self._where(), part=OutputText())]

    def add(self, piece: Piece, logprobs: Sequence[ChatTokenLogprob]) -> list[OutputEvent]:
        assert isinstance(piece, Words), piece
        self._parts.append(piece.text)
        self.logprobs += logprobs
        return [OutputTextDelta(**self._where(), delta=piece.text, logprobs=list(logprobs))]

    def end(self, status: Status) -> tuple[OutputItem, list[OutputEvent]]:
        part = OutputText(text="".join(self._parts), logprobs=self.logprobs)
        item = MessageItem(id=self._id, status=status, content=[part])
        return item, [
            OutputTextDone(**self._where(), text=part.text, logprobs=part.logprobs),
            PartDone(**self._where(), part=part),
            self._done(item),
        ]


class _OpenCall(_OpenItem):
    prefix = "fc"

    def __init__(self, index: int, next_number: Number, first: ToolCallDelta) -> None:
        super().__init__(index, next_number)
        self._call = first

    def takes(self, piece: Piece) -> bool:
        return isinstance(piece, ToolCallDelta) and piece.index == self._call.index

    def begin(self) -> list[OutputEvent]:
        return [self._added(self._item("in_progress"))]

    def add(self, piece: Piece, logprobs: Sequence[ChatTokenLogprob]) -> list[OutputEvent]:
        assert isinstance(piece, ToolCallDelta), piece
        if not piece.arguments:
            return []
        self._parts.append(piece.arguments)
        return [ArgumentsDelta(**self._where(), delta=piece.arguments)]

    def end(self, status: Status) -> tuple[OutputItem, list[OutputEvent]]:
        item = self._item(status)
        done = ArgumentsDone(**self._where(), name=item.name, arguments=item.arguments)
        return item, [done, self._done(item)]

    def _item(self, status: Status) -> FunctionCallItem:
        return FunctionCallItem(
            id=self._id,
            status=status,
            call_id=self._call.id,
            name=self._call.name,
            arguments="".join(self._parts),
        )


def _open(piece: Piece, index: int, next_number: Number) -> _OpenItem:
    match piece:
        case Reasoning():
            return _OpenReasoning(index, next_number)
        case Words():
            return _OpenMessage(index, next_number)
        case ToolCallDelta():
            return _OpenCall(index, next_number, piece)
