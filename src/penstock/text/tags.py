"""Tags in text that arrives in pieces: where one may have begun, and blanks around them."""

import functools
import re
from collections.abc import Sequence


@functools.lru_cache(maxsize=64)
def any_of(tags: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, tags)))


def first_possible_start(text: str, tags: Sequence[str]) -> int:
    """Where the longest tail of `text` that begins one of `tags` starts; its end if none does."""
    longest = max(map(len, tags), default=0)
    for at in range(max(0, len(text) - longest + 1), len(text)):
        tail = text[at:]
        if any(tag.startswith(tail) for tag in tags):
            return at
    return len(text)


class Trimmed:
    """Text without the blanks at its start; those at its end wait for what follows them."""

    def __init__(self, from_start: bool = True) -> None:
        self._at_start = from_start
        self._blanks: list[str] = []

    def push(self, text: str) -> str:
        if self._at_start:
            text = text.lstrip()
            self._at_start = not text
        words = text.rstrip()
        if not words:
            self._blanks.append(text)
            return ""
        held, self._blanks = "".join(self._blanks), [text[len(words) :]]
        return held + words

    def blanks(self) -> str:
        """Those at the end, which nothing followed; they are forgotten."""
        held, self._blanks = "".join(self._blanks), []
        return held
