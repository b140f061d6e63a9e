"""`Fields`: typed reader of a configuration: each field is checked when it is read.

Nothing a file can hold in the place of a value ends in anything but a `ConfigError` that names
file, field and value. What fields mean is for `spec.py` and the families to say. Needs no torch.
"""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from penstock.errors import ConfigError

_MOST = 2**31 - 1  # of a count: sizes, positions and ids are 32-bit integers on the device
_MAX_SHOWN = 60


class Fields:
    """Of `file` (config.json) in `folder`. A null is as good as absent."""

    def __init__(self, folder: Path, fields: Mapping[str, Any], file: str = "config.json") -> None:
        self.folder = folder
        self.fields = fields
        self._file = file

    def refuse(self, name: str, why: str) -> NoReturn:
        raise ConfigError(
            f"{self._file} of '{self.folder}': {name}: {why}; correct the file, or use another "
            "checkpoint"
        )

    def has(self, name: str) -> bool:
        return name in self.fields

    def get(self, name: str, default: Any = None) -> Any:
        value = self.fields.get(name)
        return default if value is None else value

    def count(
        self, name: str, default: int | None = None, least: int = 1, most: int = _MOST
    ) -> int:
        value = self._given(name, default)
        if not _is_integer(value) or value < least:
            kind = "a positive integer" if least == 1 else f"an integer from {least} on"
            self._wrong(name, value, kind)
        if value > most:
            self._wrong(name, value, f"at most {most}")
        return int(value)

    def number(self, name: str, default: float | None = None, above: float | None = None) -> float:
        """A finite one, and larger than `above`."""
        value = self._given(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            self._wrong(name, value, "a number")
        if not abs(value) < 1e300 or not math.isfinite(value):
            self._wrong(name, value, "finite")
        if above is not None and not value > above:
            self._wrong(name, value, f"more than {above:g}")
        return float(value)

    def optional_number(
        self, name: str, default: float | None = None, above: float | None = None
    ) -> float | None:
        """`default` is for an absent one: here absent and null differ."""
        if name not in self.fields:
            return default
        return None if self.get(name) is None else self.number(name, above=above)

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            self._wrong(name, value, "true or false")
        return value

    def text(self, name: str, default: str = "") -> str:
        value = self.get(name, default)
        if not isinstance(value, str):
            self._wrong(name, value, "a text")
        return value

    def texts(self, name: str) -> list[str] | None:
        """None where there is none."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            self._wrong(name, value, "a list of texts")
        return value

    def counts(self, name: str) -> list[int]:
        value = self.get(name, [])
        if not isinstance(value, list) or not all(map(_is_integer, value)):
            self._wrong(name, value, "a list of integers")
        return value

    def numbers(self, name: str) -> tuple[float, ...]:
        """Finite ones; none where there are none."""
        value = self.get(name, [])
        if not isinstance(value, list):
            self._wrong(name, value, "a list of numbers")
        items = Fields(self.folder, {f"{name}[{i}]": item for i, item in enumerate(value)})
        return tuple(map(items.number, items.fields))

    def mapping(self, name: str) -> Mapping[str, Any]:
        """Empty where there is none."""
        value = self.get(name, {})
        if not isinstance(value, Mapping):
            self._wrong(name, value, "an object")
        return value

    def ids(self, name: str) -> tuple[int, ...]:
        """Of one token or of several; none where there is none."""
        value = self.get(name, ())
        ids = (value,) if not isinstance(value, list | tuple) else tuple(value)
        for token_id in ids:
            if not _is_integer(token_id) or not 0 <= token_id <= _MOST:
                self._wrong(name, value, "the id of a token, or a list of ids of tokens")
        return ids

    def one_of(self, name: str, value: Any, known: Iterable[str]) -> str:
        """`value` itself, which is one of the texts in `known`."""
        if not isinstance(value, str) or value not in (known := tuple(known)):
            self.refuse(name, f"{_shown(value)} is not supported; there are {', '.join(known)}")
        return value

    def _given(self, name: str, default: Any) -> Any:
        if (value := self.get(name, default)) is None:
            self.refuse(name, "is missing")
        return value

    def _wrong(self, name: str, value: Any, wanted: str) -> NoReturn:
        self.refuse(name, f"is {_shown(value)}, it must be {wanted}")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    """As Python writes it, cut when long."""
    if isinstance(value, int) and abs(value) >= 10**_MAX_SHOWN:
        return f"a number of more than {_MAX_SHOWN} digits"
    try:
        text = repr(value)
    except RecursionError:
        return "nested too deeply"
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."
