"""`Rules`: a grammar in the making, in llguidance's Lark, with grammars of their own for parts."""

import json
import re
from collections.abc import Mapping
from typing import Any

from penstock.errors import RequestError
from penstock.text.grammars.library import MAX_GRAMMAR_CHARS, fault_of
from penstock.text.tokenizer import Tokenizer

ANY_TEXT = r"/(.|\n)*/"


class Rules:
    """Names of rules are small, names of terminals capital; both are the caller's to choose."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._rules: dict[str, str] = {}
        self._parts: list[dict[str, Any]] = []
        self._numbers: dict[str, int] = {}

    def rule(self, name: str, body: str) -> str:
        """Define it, once; several callers may need the same."""
        assert self._rules.setdefault(name, body) == body, (name, body)
        return name.partition("[")[0]

    def numbered(self, name: str, body: str, options: str = "") -> str:
        """The same for bodies that have no name of their own."""
        return self.rule(
            f"{name}{self._numbers.setdefault(body, len(self._numbers))}{options}", body
        )

    def part(self, grammar: Mapping[str, Any]) -> str:
        """A grammar of its own: `json_schema` or `lark_grammar`; returns what stands for it."""
        name = f"part{len(self._parts)}"
        self._parts.append({"name": name, **grammar})
        return f"@{name}"

    def special_id(self, tag: str) -> int | None:
        """The id of a tag that the vocabulary calls special: such a token is no text."""
        found = self._tokenizer.id_of(tag)
        return found if found in self._tokenizer.special_ids else None

    def words(self, text: str, *tags: str) -> str:
        """Exactly this text. `tags` in it are tokens, where the vocabulary has them as such."""
        special = [tag for tag in tags if tag in text and self.special_id(tag) is not None]
        if not special:
            return _quoted(text)
        pieces = re.split(f"({'|'.join(map(re.escape, special))})", text)
        return " ".join(
            f"<[{self.special_id(piece)}]>" if piece in special else _quoted(piece)
            for piece in pieces
            if piece
        )

    def up_to(self, name: str, tag: str) -> str:
        """Any text, up to and with the first `tag`."""
        if (token_id := self.special_id(tag)) is not None:
            return f"{self.rule('TEXT', ANY_TEXT)} <[{token_id}]>"
        return self.rule(f"{name}[lazy]", rf"/(.|\n)*{in_regex(tag)}/")

    def to_text(self, start: str, param: str) -> str:
        """The whole grammar, checked, or a `RequestError` that names `param`."""
        lines = [f"start: {start}", *(f"{name}: {body}" for name, body in self._rules.items())]
        main = {"name": "main", "lark_grammar": "\n".join(lines)}
        text = json.dumps({"grammars": [main, *self._parts]}, ensure_ascii=False)
        if len(text) > MAX_GRAMMAR_CHARS:
            raise RequestError(
                "invalid_value",
                f"{param} makes a grammar of {len(text)} characters, at most {MAX_GRAMMAR_CHARS} "
                "are compiled; make it smaller",
                param,
            )
        if (fault := fault_of(text)) is not None:
            raise RequestError("invalid_value", f"{param}: {fault}", param)
        return text


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def in_regex(text: str) -> str:
    escaped = re.sub(r"([\\.+*?()|\[\]{}^$/#&~-])", r"\\\1", text)
    return escaped.replace("\n", r"\n")
