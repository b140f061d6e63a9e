"""Takes the thoughts out of an answer that begins with `<think>thoughts</think>`.

Only a block at the very start counts: the same marks later on are words of the answer. Blanks
around thoughts and answer are dropped. Knows text only, in pieces of any size.
"""

from enum import Enum, auto

from penstock.text.marks import Trimmed, first_possible_start

OPEN, CLOSE = "<think>", "</think>"
# An answer that opens with more blanks than this is no block of thoughts.
_MAX_BLANKS = 1024


class _At(Enum):
    START = auto()
    THOUGHTS = auto()
    ANSWER_START = auto()
    ANSWER = auto()


class ThinkParser:
    """`begins_inside`: the prompt has opened the block, or the model leaves the opening out."""

    def __init__(self, begins_inside: bool = False) -> None:
        self._begins_inside = begins_inside
        self._at = _At.START
        self._held = ""
        self._thoughts = Trimmed()

    def push(self, text: str) -> tuple[str, str]:
        """New (thoughts, answer)."""
        if self._at is _At.ANSWER:
            return "", text
        text, self._held = self._held + text, ""
        if self._at is _At.START:
            text = self._past_opening(text)
        thoughts = ""
        if self._at is _At.THOUGHTS:
            thoughts, text = self._think(text)
        if self._at is _At.ANSWER_START and (text := text.lstrip()):
            self._at = _At.ANSWER
        return thoughts, text

    def finish(self) -> tuple[str, str]:
        """What was held back for a mark that never came."""
        held, self._held = self._held, ""
        if self._at is _At.THOUGHTS or (self._at is _At.START and self._begins_inside):
            return self._thoughts.push(held), ""
        return "", held

    def _past_opening(self, text: str) -> str:
        """The text after the opening mark, if it is known whether there is one."""
        words = text.lstrip()
        if len(text) - len(words) <= _MAX_BLANKS:
            if words.startswith(OPEN):
                self._at = _At.THOUGHTS
                return words[len(OPEN) :]
            if OPEN.startswith(words):
                self._held = text
                return ""
        self._at = _At.THOUGHTS if self._begins_inside else _At.ANSWER
        return text

    def _think(self, text: str) -> tuple[str, str]:
        """(thoughts, what follows them)."""
        thoughts, closing, rest = text.partition(CLOSE)
        if closing:
            self._at = _At.ANSWER_START
            return self._thoughts.push(thoughts), rest
        safe = first_possible_start(text, (CLOSE,))
        self._held = text[safe:]
        return self._thoughts.push(text[:safe]), ""
