"""Finds the first stop string in text that arrives in pieces; holds back what might become one.

The result does not depend on how the text was cut: the match that is complete first wins, among
those the one that began first. Knows text only.
"""

from collections.abc import Sequence

from penstock.text.tags import first_possible_start


class StopStrings:
    """`push` returns text that is safe to show; once `found` is set, the rest is dropped."""

    def __init__(self, stops: Sequence[str], include_in_output: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include_in_output
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        if self.found is not None:
            return ""
        text = self._held + text
        matches = [
            (at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0
        ]
        if matches:
            end, start, self.found = min(matches)
            self._held = ""
            return text[: end if self._include else start]
        safe = first_possible_start(text, self._stops)
        self._held = text[safe:]
        return text[:safe]

    def flush(self) -> str:
        """The text held back for a stop string that never came."""
        held, self._held = self._held, ""
        return held
