"""`SettingChoice`: a setting that was decided, and why. `GET /version` and the log show all."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingChoice:
    name: str
    value: str
    reason: str
