"""Reads one tool call that is written as a Python call: `f(a=1, b=["x", None], c={"k": True})`.

Nothing is evaluated: constants, lists, tuples and dicts are translated to JSON by a parser of
their own, in time linear in the text. A call is kept until its closing parenthesis; what then is
no call of keyword arguments is text.
"""

import re
from collections.abc import Iterator

from penstock.text.tools.call_parser import After, Ended
from penstock.text.tools.calls import Calls
from penstock.text.tools.json_call import whole_characters
from penstock.text.tools.schemas import quoted

_MAX_DEPTH = 32
_OUTSIDE = re.compile(r"['\"()\[\]{}]")
_INSIDE = {quote: re.compile(rf"\\|{quote}") for quote in "'\""}
_TOKEN = re.compile(
    r"\s*(?:(?P<string>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")"
    r"|(?P<number>-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)(?![\w.])"
    r"|(?P<word>[^\W\d]\w*)"
    r"|(?P<mark>[][(){}=:,]))",
    re.DOTALL,
)
_CONSTANTS = {
    **{"True": "true", "False": "false", "None": "null"},
    **{"true": "true", "false": "false", "null": "null"},
}
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", "b": "\b", "f": "\f", "v": "\v", "\n": ""}


class PythonCall:
    """`head` ends with the opening parenthesis of the call `name`."""

    def __init__(self, calls: Calls, name: str, head: str, after: After) -> None:
        self.ended: Ended | None = None
        self.after = after
        self._calls = calls
        self._name = name
        self._head = head
        self._raw: list[str] = []
        self._depth = 1
        self._quote = ""
        self._is_escaped = False

    def read(self, text: str, at: int) -> int:
        start = at
        while at < len(text) and self._depth:
            at = self._read_string(text, at) if self._quote else self._read_code(text, at)
        self._raw.append(text[start:at])
        if not self._depth:
            self._close()
        return at

    def flush(self) -> str:
        return "" if self.ended is Ended.CALL else self._head + "".join(self._raw)

    def _read_code(self, text: str, at: int) -> int:
        if (found := _OUTSIDE.search(text, at)) is None:
            return len(text)
        if found[0] in _INSIDE:
            self._quote = found[0]
        else:
            self._depth += 1 if found[0] in "([{" else -1
        return found.end()

    def _read_string(self, text: str, at: int) -> int:
        if self._is_escaped:
            self._is_escaped = False
            return at + 1
        if (found := _INSIDE[self._quote].search(text, at)) is None:
            return len(text)
        if found[0] == "\\":
            self._is_escaped = True
        else:
            self._quote = ""
        return found.end()

    def _close(self) -> None:
        try:
            arguments = arguments_as_json("".join(self._raw)[:-1])
        except ValueError:
            self.ended = Ended.TEXT
            return
        self._calls.begin(self._name)
        self._calls.add(arguments)
        self.ended = Ended.CALL


def arguments_as_json(code: str) -> str:
    """`a=1, b="x"` -> `{"a": 1, "b": "x"}`; ValueError if it is something else."""
    tokens = _Tokens(code)
    items = list(_items(tokens, "", "=", 0))
    return "{" + ", ".join(items) + "}"


class _Tokens:
    """`kind` and `text` of the token that is next; "" and "" at the end."""

    def __init__(self, code: str) -> None:
        self._code = code
        self._end = len(code.rstrip())
        self._at = 0
        self.kind = self.text = ""
        self.step()

    def step(self) -> str:
        """Past the token; its text."""
        passed = self.text
        if self._at == self._end:
            self.kind = self.text = ""
            return passed
        if (token := _TOKEN.match(self._code, self._at)) is None or token.lastgroup is None:
            raise ValueError("no token of a literal")
        self._at = token.end()
        self.kind, self.text = token.lastgroup, token[token.lastgroup]
        return passed

    def expect(self, mark: str) -> None:
        if self.text != mark or self.kind == "string":
            raise ValueError(f"no {mark}")
        self.step()


def _items(tokens: _Tokens, end: str, between: str, depth: int) -> Iterator[str]:
    """Up to `end`: values, or with `between` pairs of a name and a value."""
    while tokens.text != end:
        key = ""
        if between:
            if tokens.kind != ("word" if between == "=" else "string"):
                raise ValueError("no name")
            key = tokens.step()
            key = f"{quoted(key if between == '=' else _unquoted(key))}: "
            tokens.expect(between)
        yield key + _value(tokens, depth)
        if tokens.text == end:
            return
        tokens.expect(",")


def _value(tokens: _Tokens, depth: int) -> str:
    if depth == _MAX_DEPTH:
        raise ValueError("nested too deeply")
    kind, text = tokens.kind, tokens.step()
    match kind, text:
        case "string", _:
            return quoted(_unquoted(text))
        case "number", _:
            return text
        case "word", _ if text in _CONSTANTS:
            return _CONSTANTS[text]
        case "mark", "[" | "(":
            end = "]" if text == "[" else ")"
            values = list(_items(tokens, end, "", depth + 1))
            tokens.expect(end)
            return "[" + ", ".join(values) + "]"
        case "mark", "{":
            pairs = list(_items(tokens, "}", ":", depth + 1))
            tokens.expect("}")
            return "{" + ", ".join(pairs) + "}"
    raise ValueError("no literal")


def _unquoted(string: str) -> str:
    return whole_characters(_ESCAPE.sub(_unescaped, string[1:-1]))


def _unescaped(escape: re.Match[str]) -> str:
    hexadecimal, letter = escape[1] or escape[2] or escape[3], escape[4]
    if hexadecimal is None:
        return _ESCAPED.get(letter, letter if letter in "\\'\"" else "\\" + letter)
    code = int(hexadecimal, 16)
    return chr(code) if code <= 0x10FFFF else escape[0]
