"""Decisions on their way from settings to the `RunConfig`: each value with the reason for it."""

from typing import TypeVar

from penstock.types.setting_choice import SettingChoice

_GIB = 2**30

T = TypeVar("T")
Reasoned = tuple[T, str]  # a value and why


class Choices:
    """Writes down every decision, in order; the start prints them."""

    def __init__(self) -> None:
        self.made: list[SettingChoice] = []

    def add(self, name: str, reasoned: Reasoned[T]) -> T:
        value, reason = reasoned
        shown = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        if name.endswith("_bytes") and isinstance(value, int):
            shown = f"{value / _GIB:.2f} GiB"
        self.made.append(SettingChoice(name=name, value=shown or "none", reason=reason))
        return value
