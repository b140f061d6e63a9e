"""`CallParser`: takes tool calls out of text; a format is a table of heads and of blocks.

A head opens a block, which reads one call. Around blocks is text. What only looks like a head, and
a block that turns out to be no call, is text, too; blanks between text and calls are dropped. Text
comes in pieces of any size. Every character is looked at a bounded number of times: what is held
back for a head is bounded, and a block reads on where it stopped.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from penstock.text.tags import Trimmed, any_of, first_possible_start
from penstock.text.tools.calls import Calls
from penstock.text.tools.heads import Found, Miss, Step, follow

_NOT_BLANK = re.compile(r"[^ \t\r\n]")


class Ended(Enum):
    CALL = auto()  # it has ended, or broke off after it was named
    TEXT = auto()  # it is no call


class Block(Protocol):
    """Reads one call, from the end of its head."""

    @property
    def ended(self) -> Ended | None: ...

    @property
    def after(self) -> "After":
        """What may follow the call, once there is one."""

    def read(self, text: str, at: int) -> int:
        """Go on at `at`; where it stopped. What it left of the text, it gets again."""

    def flush(self) -> str:
        """The block is over, or the output is. What is left of it as text."""


@dataclass(frozen=True, slots=True)
class Opening:
    """What the `Found` head begins: None, if it is text after all."""

    steps: tuple[Step, ...]
    begin: Callable[[Calls, Found, str], Block | None]  # the last are the words of the head


@dataclass(frozen=True, slots=True)
class After:
    """What may follow a call: further calls, or ends of lists and fences, right behind it; and
    closing tags, each of which is left out once, in this order."""

    openings: tuple[Opening, ...] = ()
    ends: tuple[str, ...] = ()
    closings: tuple[str, ...] = ()


class CallParser:
    """`openings` begin with a tag and count everywhere, `bare` ones only where the text begins."""

    def __init__(
        self,
        openings: Sequence[Opening],
        bare: Sequence[Opening] = (),
        calls: Calls | None = None,
    ) -> None:
        self.calls = Calls() if calls is None else calls
        self._openings: dict[str, list[Opening]] = {}
        for opening in openings:
            tag = opening.steps[0]
            assert isinstance(tag, str), opening
            self._openings.setdefault(tag, []).append(opening)
        self._edge = After(tuple(bare))  # what counts right here, blanks aside
        self._closings: tuple[str, ...] = ()
        self._block: Block | None = None  # that is being read
        self._held = ""
        self._text = Trimmed(from_start=False)

    def push(self, text: str) -> str:
        """New content; news of calls are in `calls`."""
        text, self._held = self._held + text, ""
        said: list[str] = []
        at = 0
        while at < len(text):
            if self._block is not None:
                at = self._read_block(self._block, text, at, said)
            elif self._edge.openings or self._edge.ends:
                at = self._read_edge(text, at, said)
            else:
                at = self._read_text(text, at, said)
        return "".join(said)

    def flush(self) -> str:
        """What was held back for a tag or a name that never came."""
        said = ""
        if self._block is not None:
            said = self._text.push(self._block.flush())
            self._block = None
        said += self._text.push(self._held)
        self._held = ""
        return said if self.calls.count else said + self._text.blanks()

    def _read_edge(self, text: str, at: int, said: list[str]) -> int:
        found = _NOT_BLANK.search(text, at)
        start = len(text) if found is None else found.start()
        said.append(self._text.push(text[at:start]))
        if found is None:
            return start
        edge = self._edge
        for tag in edge.ends:
            if isinstance(end := follow((tag,), text, start), Found):
                self._edge = After()
                return end.end
            if end is Miss.NOT_YET:
                self._held = text[start:]
                return len(text)
        if (end_of_head := self._enter(edge.openings, text, start)) is not None:
            return end_of_head
        self._edge = After()
        return start

    def _read_text(self, text: str, at: int, said: list[str]) -> int:
        tags = (*self._openings, *self._closings)
        if (tag := any_of(tags).search(text, at)) is None:
            safe = max(at, first_possible_start(text, tags))
            said.append(self._text.push(text[at:safe]))
            self._held = text[safe:]
            return len(text)
        said.append(self._text.push(text[at : tag.start()]))
        if tag[0] in self._closings:
            self._closings = self._closings[self._closings.index(tag[0]) + 1 :]
            return tag.end()
        if (end := self._enter(self._openings[tag[0]], text, tag.start())) is not None:
            return end
        self._closings = ()
        said.append(self._text.push(tag[0]))
        return tag.end()

    def _enter(self, openings: Sequence[Opening], text: str, at: int) -> int | None:
        """Where to read on, the end of the text if more of it is needed; None: no head is here."""
        is_open = False
        for opening in openings:
            found = follow(opening.steps, text, at)
            if isinstance(found, Found):
                self._block = opening.begin(self.calls, found, text[at : found.end])
                if self._block is not None:
                    self._edge, self._closings = After(), ()
                    return found.end
            is_open |= found is Miss.NOT_YET
        if not is_open:
            return None
        self._held = text[at:]
        return len(text)

    def _read_block(self, block: Block, text: str, at: int, said: list[str]) -> int:
        end = block.read(text, at)
        if block.ended is None:
            self._held = text[end:]
            return len(text)
        self._block = None
        if block.ended is Ended.TEXT:
            said.append(self._text.push(block.flush()))
            return end
        self._text = Trimmed()  # with the blanks before the call
        self._edge, self._closings = block.after, block.after.closings
        return end
