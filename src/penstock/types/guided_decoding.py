"""`GuidedDecodingParams`: what an output must look like, in the words of the user."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import RequestError

_MAX_PATTERN = 128
_WHITESPACE = re.compile(r"(?:\\[sntr]|[ \t\n\r\[\]()|?*+]|\{\d{0,3}(?:,\d{0,3})?\})*")
KINDS = ("json", "regex", "grammar", "json_object", "structural_tag", "choice")


@dataclass(frozen=True, slots=True, kw_only=True)
class GuidedDecodingParams:
    """One of them. `json`: a JSON Schema as text, a mapping, or a class of pydantic's; afterwards
    text. `grammar`: EBNF. `structural_tag`: JSON as text or mapping. `choice`: one of these texts.
    """

    json: Any = None
    regex: str | None = None
    grammar: str | None = None
    json_object: bool = False
    structural_tag: Any = None
    choice: Sequence[str] | None = None
    whitespace_pattern: str | None = None  # between the tokens of JSON; "" is none
    param: str = field(default="guided_decoding", compare=False, repr=False)  # for errors

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise RequestError(
                "invalid_value",
                f"{self.param} has {' and '.join(given) or 'none'} of {', '.join(KINDS)}; give "
                "exactly one",
                self.param,
            )
        self._check_whitespace()
        for name in ("json", "structural_tag"):
            object.__setattr__(self, name, _as_text(getattr(self, name)))
        if self.choice is not None:
            object.__setattr__(self, "choice", tuple(self.choice))

    def _check_whitespace(self) -> None:
        pattern = self.whitespace_pattern
        if pattern is None:
            return
        if self.kind not in ("json", "json_object"):
            raise RequestError(
                "invalid_value",
                f"{self.param}: whitespace_pattern is of JSON, {self.kind} has its own",
                "whitespace_pattern",
            )
        if len(pattern) > _MAX_PATTERN or not _WHITESPACE.fullmatch(pattern):
            raise RequestError(
                "invalid_value",
                f"{self.param}: whitespace_pattern is {pattern[:80]!r}, it must be a regular "
                r"expression of \s, \n, \t, \r and blanks alone",
                "whitespace_pattern",
            )

    @property
    def kind(self) -> str:
        return next(name for name in KINDS if getattr(self, name) not in (None, False))


def _as_text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    schema_of = getattr(value, "model_json_schema", None)  # pydantic's
    return json.dumps(value if schema_of is None else schema_of(), ensure_ascii=False)
