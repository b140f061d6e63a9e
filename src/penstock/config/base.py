"""What every section of the schema is built from: `StrictModel` and `setting`."""

from collections.abc import Iterator, Mapping
from enum import StrEnum
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, model_validator

Status = Literal["stable", "beta", "prototype"]


class StrictModel(BaseModel):
    """Refuses unknown names and does not guess types: `true` is no number and "8" is no integer.

    Names of choices may be in any case, and booleans in quotes.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _read_words(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        words = _words_of(cls)
        return {
            name: words[name].get(value.lower(), value)
            if isinstance(value, str) and name in words
            else value
            for name, value in values.items()
        }


def setting(default: Any, description: str, *, status: Status = "stable", **bounds: Any) -> Any:
    """A described, bounded field. `status` says how likely its meaning is to stay as it is."""
    return Field(
        default=default, description=description, json_schema_extra={"status": status}, **bounds
    )


@cache
def _words_of(model: type[BaseModel]) -> dict[str, dict[str, object]]:
    """What a word in small letters means, of each field that takes no other text."""
    found = {}
    for name, field in model.model_fields.items():
        parts = [*_parts(field.annotation)]
        if str in parts:
            continue
        words: dict[str, object] = {one.lower(): one for one in parts if isinstance(one, str)}
        found[name] = words | ({"true": True, "false": False} if bool in parts else {})
    return found


def _parts(annotation: Any) -> Iterator[object]:
    """Types and literal values that a union is made of."""
    if get_origin(annotation) in (Union, UnionType, Literal):
        for one in get_args(annotation):
            yield from _parts(one)
    elif isinstance(annotation, type) and issubclass(annotation, StrEnum):
        yield from annotation
    else:
        yield annotation
