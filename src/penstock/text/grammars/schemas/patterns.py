"""Regular expressions of schemas: the texts that are not some texts, and searches that end."""

import re
from collections.abc import Sequence
from typing import Any

_ANY = r"[\s\S]"
_MAX_LEAD = 256  # characters before what an unanchored pattern looks for
_MAX_AROUND = 64  # the same in a key, and behind it
# Anything that is written comes to these.
_ONE_LETTER = re.compile(r"(\\[a-zA-Z]|\.|\[[^\[\]\\]*\])[*+]?")
_ANCHORS = ("b", "B", "A", "z", "Z")


def exactly(texts: Sequence[str]) -> str:
    return f"^(?:{'|'.join(map(_literal, texts))})$"


def with_length(least: int, most: int | None) -> str:
    return f"^{_ANY}{{{least},{'' if most is None else most}}}$"


def other_texts(texts: Sequence[str]) -> str:
    """A text that is none of these."""
    root: dict[str, Any] = {}
    for text in texts:
        node = root
        for letter in text:
            node = node.setdefault(letter, {})
        node[""] = {}
    return f"^(?:{_other(root)})$"


def _other(node: dict[str, Any]) -> str:
    """Of what may follow here: the end, if no text ends, another letter, or one of these and then
    something else."""
    letters = sorted(letter for letter in node if letter)
    ways = [] if "" in node else [""]
    ways.append(f"[^{''.join(map(_escaped, letters))}]{_ANY}*" if letters else f"{_ANY}+")
    ways += [f"{_literal(letter)}(?:{_other(node[letter])})" for letter in letters]
    return "|".join(ways)


def _literal(text: str) -> str:
    return "".join(map(_escaped, text))


def _escaped(letter: str) -> str:
    if ord(letter) < 32:
        return f"\\x{ord(letter):02x}"
    return f"\\{letter}" if letter in r"\.+*?()|[]{}^$#&-~" else letter


def bounded(pattern: str) -> str:
    """The same, but not endlessly far from the beginning: a model could write on forever without
    coming to what is looked for. Valid as before, only fewer."""
    return _within(pattern, _MAX_LEAD, None)


def bounded_key(pattern: str) -> str:
    """A key ends, too. Of those of at most `is_short_key` all are left."""
    return _within(pattern, _MAX_AROUND, _MAX_AROUND)


def is_short_key(name: str) -> bool:
    return len(name) <= _MAX_AROUND


def _within(pattern: str, lead: int, tail: int | None) -> str:
    pieces = _alternatives(pattern) if pattern else None
    return pattern if pieces is None else "|".join(_piece(one, lead, tail) for one in pieces)


def _piece(piece: str, lead: int, tail: int | None) -> str:
    is_begun = piece.startswith("^")
    is_ended = piece.endswith("$")  # `_alternatives` has seen that it is no letter
    body = piece[1 if is_begun else 0 : -1 if is_ended else None]
    free = re.match(r"(\.|\[\\[sS]\\[sS]\])([*+])(?!\?)", body) if is_begun else None
    if free is not None and (rest := body[free.end() :]):
        body = f"{free[1]}{{{int(free[2] == '+')},{lead}}}{rest}"
    elif is_begun and (is_ended or tail is None):
        return piece
    is_found = not is_begun and not is_ended and _ONE_LETTER.fullmatch(body)
    if is_found and tail is None:
        return piece
    before = "" if is_begun else f"{_ANY}{{0,{lead}}}"
    behind = "$" if is_ended else "" if tail is None else f"{_ANY}{{0,{tail}}}$"
    return f"^{before}(?:{body}){behind}"


def _alternatives(pattern: str) -> list[str] | None:
    """Of the whole pattern. None: an anchor or a flag within it, or a class that is hard to read,
    so it cannot be taken apart."""
    pieces, start, depth, in_class, i = list[str](), 0, 0, False, 0
    while i < len(pattern):
        letter = pattern[i]
        if letter == "\\":
            is_last = pattern[i + 2 : i + 3] in ("", "|")
            if pattern[i + 1 : i + 2] in _ANCHORS or (is_last and pattern[i + 1 : i + 2] == "$"):
                return None
            i += 2
            continue
        if in_class:
            if letter == "[":
                return None
            in_class = letter != "]"
        elif letter == "[":
            if re.match(r"\[\^?\]", pattern[i:]):
                return None
            in_class = True
        elif pattern.startswith("(?", i) and pattern[i + 2 : i + 3] not in (":", "P", "<"):
            return None  # flags
        elif letter in "()":
            depth += 1 if letter == "(" else -1
        elif letter == "|" and depth == 0:
            pieces.append(pattern[start:i])
            start = i + 1
        elif (letter == "^" and i != start) or (
            letter == "$" and not (i + 1 == len(pattern) or (depth == 0 and pattern[i + 1] == "|"))
        ):
            return None
        i += 1
    return [*pieces, pattern[start:]]
