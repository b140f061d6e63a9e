"""What every section of the schema is built from: `StrictModel` and `setting`."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Status = Literal["stable", "beta", "prototype"]


class StrictModel(BaseModel):
    """Refuses unknown names and does not guess types: `true` is no number and "8" is no integer."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, validate_default=True)


def setting(default: Any, description: str, *, status: Status = "stable", **bounds: Any) -> Any:
    """A described, bounded field. `status` says how likely its meaning is to stay as it is."""
    return Field(
        default=default, description=description, json_schema_extra={"status": status}, **bounds
    )
