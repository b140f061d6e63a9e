"""Reads one tool call that is a JSON object: `{"name": .., "arguments": ..}`.

The JSON is followed character by character, so a tag inside one of its strings is part of it, and
arguments are passed on as they come, letter for letter. An object whose name cannot be read is
text. `JsonArguments` reads the object of a call that was named before it.
"""

import json
import re
from collections.abc import Container
from enum import Enum, auto

from penstock.text.tools.call_parser import After, Ended
from penstock.text.tools.calls import Calls

# A block that has not named its tool after so many characters is text.
_MAX_UNNAMED_CHARS = 1 << 16
_NO_ARGUMENTS = "{}"

_NOT_BLANK = re.compile(r"[^ \t\r\n]")
_STRING_EVENT = re.compile(r'["\\]')
_NESTED_EVENT = re.compile(r'["{}\[\]<]')  # JSON has no < outside its strings
_SCALAR_END = re.compile(r"[ \t\r\n,}\]<]")
_KEYS = ("arguments", "parameters")  # Llama says the latter


class _At(Enum):
    """What a block is expected to go on with."""

    OBJECT = auto()
    KEY = auto()
    KEY_TEXT = auto()
    COLON = auto()
    VALUE = auto()
    STRING = auto()  # a value that is one
    SCALAR = auto()
    NESTED = auto()  # an object or a list
    NESTED_STRING = auto()
    COMMA = auto()
    DONE = auto()  # the object has ended, or broke off after it was named
    NO_CALL = auto()  # it is not one


class JsonCall:
    """Until the name is known everything is kept. `names`: those that count; None: every one."""

    def __init__(
        self,
        calls: Calls,
        head: str,
        after: After,
        names: Container[str] | None = None,
    ) -> None:
        self.at = _At.OBJECT
        self.after = after
        self._calls = calls
        self._names = names
        self._is_named = False
        self._has_arguments = False  # they have been passed on, whole
        self._raw = [head]
        self._num_raw = 0
        self._key = ""
        self._value: list[str] = []  # of the key or value being read, unless it is passed on
        self._waiting: str | None = None  # arguments that came before the name
        self._depth = 0
        self._is_escaped = False

    @property
    def ended(self) -> Ended | None:
        if self.at is _At.NO_CALL:
            return Ended.TEXT
        return Ended.CALL if self.at is _At.DONE else None

    def read(self, text: str, at: int) -> int:
        """Go on at `at`; where it stopped: at the end of the text, or of the block."""
        start = at
        end = (
            len(text) if self._is_named else min(len(text), at + _MAX_UNNAMED_CHARS - self._num_raw)
        )
        while at < end and self.at not in (_At.DONE, _At.NO_CALL):
            was_named = self._is_named
            at = self._step(text, at, end)
            if self._is_named and not was_named:
                end = len(text)
        if self._is_named:
            self._raw.clear()
            return at
        self._raw.append(text[start:at])
        self._num_raw += at - start
        if self.at is _At.DONE or self._num_raw >= _MAX_UNNAMED_CHARS:
            self.at = _At.NO_CALL
        return at

    def flush(self) -> str:
        """The block is over. What is left of it as text: all of it, if it made no call."""
        if not self._is_named:
            return "".join(self._raw)
        if self.at is _At.STRING and self._key in _KEYS and not self._has_arguments:
            self._calls.add("".join(self._value))
        return ""

    def _step(self, text: str, at: int, end: int) -> int:
        """One token of the JSON, or the part of it that is here."""
        match self.at:
            case _At.KEY_TEXT | _At.STRING | _At.NESTED_STRING:
                return self._read_string(text, at, end)
            case _At.NESTED:
                return self._read_nested(text, at, end)
            case _At.SCALAR:
                return self._read_scalar(text, at, end)
        if (found := _NOT_BLANK.search(text, at, end)) is None:
            return end
        at, letter = found.start(), found[0]
        match self.at, letter:
            case (_At.OBJECT, "{"):
                self.at = _At.KEY
            case (_At.KEY, '"'):
                self._value, self.at = [letter], _At.KEY_TEXT
            case (_At.COLON, ":"):
                self.at = _At.VALUE
            case (_At.COMMA, ","):
                self.at = _At.KEY
            case (_At.KEY | _At.COMMA, "}"):
                self._end_object()
            case (_At.VALUE, '"'):
                self._value, self.at = [letter], _At.STRING
            case (_At.VALUE, "{" | "["):
                self._value, self._depth, self.at = [], 0, _At.NESTED
                return at
            case (_At.VALUE, letter) if letter not in "}],:<":
                self._value, self.at = [], _At.SCALAR
                return at
            case _:
                self._break_off()
                return at
        return at + 1

    def _read_string(self, text: str, at: int, end: int) -> int:
        start = at
        if self._is_escaped:
            at, self._is_escaped = at + 1, False
        while (found := _STRING_EVENT.search(text, at, end)) is not None:
            at = found.end()
            if found[0] == '"':
                self._take(text[start:at])
                self._end_string()
                return at
            if at == end:
                self._is_escaped = True
            at += 1
        self._take(text[start:end])
        return end

    def _end_string(self) -> None:
        if self.at is _At.NESTED_STRING:
            self.at = _At.NESTED
        elif self.at is _At.STRING:
            self._end_value()
        elif (key := decoded("".join(self._value))) is None:
            self._break_off()
        else:
            self._key, self.at = key, _At.COLON

    def _read_nested(self, text: str, at: int, end: int) -> int:
        start = at
        while (found := _NESTED_EVENT.search(text, at, end)) is not None:
            at = found.end()
            match found[0]:
                case "{" | "[":
                    self._depth += 1
                case "}" | "]":
                    self._depth -= 1
                case '"':
                    self.at = _At.NESTED_STRING
                    self._take(text[start:at])
                    return at
                case _:
                    self._take(text[start : at - 1])
                    self._break_off()
                    return at - 1
            if self._depth == 0:
                self._take(text[start:at])
                self._end_value()
                return at
        self._take(text[start:end])
        return end

    def _read_scalar(self, text: str, at: int, end: int) -> int:
        found = _SCALAR_END.search(text, at, end)
        stop = end if found is None else found.start()
        self._take(text[at:stop])
        if found is not None:
            self._end_value()
        return stop

    def _take(self, text: str) -> None:
        """A piece of the key or value: arguments go out at once, if that is possible."""
        is_arguments = self._key in _KEYS and self.at not in (_At.KEY_TEXT, _At.STRING)
        if is_arguments and self._is_named:
            if not self._has_arguments:
                self._calls.add(text)
        elif not self._is_named or self.at in (_At.KEY_TEXT, _At.STRING):
            self._value.append(text)

    def _end_value(self) -> None:
        is_string, self.at = self.at is _At.STRING, _At.COMMA
        value = "".join(self._value)
        if self._key == "name" and not self._is_named:
            name = decoded(value) if is_string else None
            if name and (self._names is None or name in self._names):
                self._name(name)
            else:
                self.at = _At.NO_CALL
        elif self._key in _KEYS:
            # Some models write the object as a string that holds its JSON.
            value = (decoded(value) or "") if is_string else value
            if not self._is_named:
                self._waiting = self._waiting or value
            elif not self._has_arguments:
                self._calls.add(value if is_string else "")
                self._has_arguments = True

    def _name(self, name: str) -> None:
        self._calls.begin(name)
        self._is_named = True
        if self._waiting:
            self._calls.add(self._waiting)
            self._has_arguments = True

    def _end_object(self) -> None:
        self.at = _At.DONE
        if self._is_named and not self._has_arguments:
            self._calls.add(_NO_ARGUMENTS)

    def _break_off(self) -> None:
        self.at = _At.DONE if self._is_named else _At.NO_CALL


def decoded(string: str) -> str | None:
    """What a JSON string says; None if it is none."""
    try:
        return whole_characters(str(json.loads(string, strict=False)))
    except ValueError:
        return None


def whole_characters(text: str) -> str:
    """Escapes may stand for halves of a character: joined, or replaced if one is alone."""
    if text.isascii():
        return text
    joined = text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    return joined.encode("utf8", "replace").decode()


class JsonArguments:
    """The arguments of a call that is named already, passed on letter for letter."""

    def __init__(self, calls: Calls, after: After) -> None:
        self.ended: Ended | None = None
        self.after = after
        self._calls = calls
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    def read(self, text: str, at: int) -> int:
        if self._depth == 0 and text[at] != "{":
            self._calls.add(_NO_ARGUMENTS)
            self.ended = Ended.CALL
            return at
        start = at
        while at < len(text) and self.ended is None:
            at = self._read_string(text, at) if self._in_string else self._read_nested(text, at)
        self._calls.add(text[start:at])
        return at

    def flush(self) -> str:
        return ""

    def _read_string(self, text: str, at: int) -> int:
        if self._is_escaped:
            self._is_escaped = False
            return at + 1
        if (found := _STRING_EVENT.search(text, at)) is None:
            return len(text)
        self._is_escaped = found[0] != '"'
        self._in_string = self._is_escaped
        return found.end()

    def _read_nested(self, text: str, at: int) -> int:
        if (found := _NESTED_EVENT.search(text, at)) is None:
            return len(text)
        match found[0]:
            case "{" | "[":
                self._depth += 1
            case "}" | "]":
                self._depth -= 1
            case '"':
                self._in_string = True
            case _:  # it broke off
                self.ended = Ended.CALL
                return found.start()
        if self._depth == 0:
            self.ended = Ended.CALL
        return found.end()
