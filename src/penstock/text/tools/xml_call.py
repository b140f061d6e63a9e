"""Reads the parameters of one tool call that are tagged one by one, and writes them as JSON.

A value is raw text up to its closing tag, and becomes what the tool's schema says. Strings are
passed on as they come, so a long one (a file, say) is streamed; other values when they are whole.
An output that ends within a value leaves the JSON open: nobody should act on half a value.
"""

from dataclasses import dataclass

from penstock.text.tags import any_of, first_possible_start
from penstock.text.tools.call_parser import After, Ended
from penstock.text.tools.calls import Calls
from penstock.text.tools.heads import Found, Miss, Step, follow
from penstock.text.tools.schemas import ToolSchemas, as_json, quoted

_STRING = frozenset(["string"])


@dataclass(frozen=True, slots=True)
class ParameterTags:
    opening: tuple[Step, ...]  # with the parameter's name
    closing: str
    is_on_lines: bool  # the value stands on lines of its own
    # Ends a value whose closing tag was forgotten; stays in the text.
    last_resort: str


class XmlArguments:
    """Of the call `name`, which is begun already."""

    def __init__(
        self, calls: Calls, name: str, schemas: ToolSchemas, tags: ParameterTags, after: After
    ) -> None:
        self.ended: Ended | None = None
        self.after = after
        self._calls = calls
        self._name = name
        self._schemas = schemas
        self._tags = tags
        self._num_values = 0
        self._in_value = False
        self._at_start = False  # of a value
        self._types: frozenset[str] | None = None
        self._value: list[str] = []  # unless it is a string

    def read(self, text: str, at: int) -> int:
        while at < len(text) and self.ended is None:
            before, was_in_value = at, self._in_value
            at = self._read_value(text, at) if self._in_value else self._read_tag(text, at)
            if at == before and self._in_value == was_in_value:
                break  # more text is needed
        return at

    def flush(self) -> str:
        if self._in_value:
            self._calls.add("".join(self._value))
        elif self.ended is None:
            self._end()
        return ""

    def _read_tag(self, text: str, at: int) -> int:
        found = follow(self._tags.opening, text, at)
        if isinstance(found, Found):
            key = found.words[0].strip()
            self._types = self._schemas.types(self._name, key)
            self._calls.add(f"{', ' if self._num_values else '{'}{quoted(key)}: ")
            if self._types == _STRING:
                self._calls.add('"')
            self._num_values += 1
            self._in_value, self._at_start, self._value = True, self._tags.is_on_lines, []
            return found.end
        if found is Miss.NOT_HERE:
            self._end()
        return at

    def _end(self) -> None:
        self._calls.add("}" if self._num_values else "{}")
        self.ended = Ended.CALL

    def _read_value(self, text: str, at: int) -> int:
        if self._at_start:
            self._at_start = False
            at += text.startswith("\n", at)
        ends = (self._tags.closing, self._tags.last_resort)
        if (end := any_of(ends).search(text, at)) is None:
            safe = max(at, first_possible_start(text, ends))
            if self._tags.is_on_lines and safe > at and text[safe - 1] == "\n":
                safe -= 1  # it may be the one before the closing tag
            self._take(text[at:safe])
            return safe
        value = text[at : end.start()]
        self._take(value.removesuffix("\n") if self._tags.is_on_lines else value)
        self._end_value()
        return end.end() if end[0] == self._tags.closing else end.start()

    def _take(self, piece: str) -> None:
        if self._types == _STRING:
            self._calls.add(quoted(piece)[1:-1])
        else:
            self._value.append(piece)

    def _end_value(self) -> None:
        self._in_value = False
        is_string = self._types == _STRING
        self._calls.add('"' if is_string else as_json("".join(self._value), self._types))
        self._value = []
