"""Splits an output that begins with `<think>reasoning</think>` into reasoning and content.

Only a block at the very start counts: the same tags later on are content. Blanks around both are
dropped. Knows text only, in pieces of any size.
"""

from collections.abc import Sequence
from enum import Enum, auto

from penstock.text.tags import Trimmed, any_of, first_possible_start

OPEN, CLOSE = "<think>", "</think>"
# An output that opens with more blanks than this has no reasoning block.
_MAX_BLANKS = 1024


class _At(Enum):
    START = auto()
    REASONING = auto()
    CONTENT_START = auto()
    CONTENT = auto()


class ThinkParser:
    """`begins_inside`: the prompt has opened the block, or the model leaves the opening out.

    `interrupts`: tags that end the block without its closing, and belong to what follows it.
    """

    def __init__(self, begins_inside: bool = False, interrupts: Sequence[str] = ()) -> None:
        self._begins_inside = begins_inside
        self._ends = (CLOSE, *interrupts)
        self._at = _At.START
        self._held = ""
        self._reasoning = Trimmed()

    def push(self, text: str) -> tuple[str, str]:
        """New (reasoning, content)."""
        if self._at is _At.CONTENT:
            return "", text
        text, self._held = self._held + text, ""
        if self._at is _At.START:
            text = self._past_opening(text)
        reasoning = ""
        if self._at is _At.REASONING:
            reasoning, text = self._reason(text)
        if self._at is _At.CONTENT_START and (text := text.lstrip()):
            self._at = _At.CONTENT
        return reasoning, text

    def flush(self) -> tuple[str, str]:
        """What was held back for a tag that never came."""
        held, self._held = self._held, ""
        if self._at is _At.REASONING or (self._at is _At.START and self._begins_inside):
            return self._reasoning.push(held), ""
        return "", held

    def _past_opening(self, text: str) -> str:
        """The text after the opening tag, if it is known whether there is one."""
        words = text.lstrip()
        if len(text) - len(words) <= _MAX_BLANKS:
            if words.startswith(OPEN):
                self._at = _At.REASONING
                return words[len(OPEN) :]
            if OPEN.startswith(words):
                self._held = text
                return ""
        self._at = _At.REASONING if self._begins_inside else _At.CONTENT
        return text

    def _reason(self, text: str) -> tuple[str, str]:
        """(reasoning, what follows it)."""
        if (end := any_of(self._ends).search(text)) is not None:
            self._at = _At.CONTENT_START
            rest = text[end.end() if end[0] == CLOSE else end.start() :]
            return self._reasoning.push(text[: end.start()]), rest
        safe = first_possible_start(text, self._ends)
        self._held = text[safe:]
        return self._reasoning.push(text[:safe]), ""
