"""Strict schemas: a JSON body -> a checked record, or a `RequestError`.

A wrong type is refused, and an unknown field with the nearest known name. Knows no endpoint.
"""

import difflib
import reprlib
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
)

from penstock.errors import RequestError
from penstock.types.sampling import MAX_LOGPROBS

_MAX_SHOWN = 80  # characters of a wrong value repeated in an error
_SHORT = reprlib.Repr()  # of a large value the beginning
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 2 * _MAX_SHOWN
_SHORT.maxlist = _SHORT.maxdict = 8
INT32_MAX = 2**31 - 1


def at_most(name: str, limit: int) -> BeforeValidator:
    """Refuses more entries than `limit` before it looks at them."""

    def check(value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > limit:
            raise RequestError(
                "invalid_value", f"{name} is {len(value)} long, at most {limit} are read", name
            )
        return value

    return BeforeValidator(check)


def shown_as(kind: Any) -> WithJsonSchema:
    """What a client may send, where validators make something else of it or bound it."""
    return WithJsonSchema(TypeAdapter(kind).json_schema(), mode="validation")


Int32 = Annotated[int, Field(ge=-(2**31), le=INT32_MAX)]
Count = Annotated[int, Field(ge=0, le=INT32_MAX)]
TopLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
# One mistake is told, so one is looked for: of a million there would be a million reports.
TokenIds = Annotated[list[Count], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    NESTED: ClassVar[Mapping[str, type["Strict"]]] = {}  # schemas of objects inside the body


M = TypeVar("M", bound=Strict)


def parse(schema: type[M], body: Any) -> M:
    """A null stands for a field that is not given."""
    if not isinstance(body, dict):
        raise RequestError("invalid_type", f"the body must be a JSON object, it is {shown(body)}")
    known = schema.model_fields
    unknown = next((name for name in body if name not in known), None)
    if unknown is not None:
        raise _unknown_field(unknown[:_MAX_SHOWN], known)
    given = {name: value for name, value in body.items() if value is not None}
    try:
        return schema.model_validate(given)
    except ValidationError as error:
        raise _request_error(error, schema) from None


def _unknown_field(where: str, known: Iterable[str]) -> RequestError:
    near = difflib.get_close_matches(where.rpartition(".")[2], known, n=1)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    return RequestError("unknown_field", f"unknown field '{where}'{hint}", where)


def _request_error(error: ValidationError, schema: type[Strict]) -> RequestError:
    first = error.errors(include_url=False, include_context=False)[0]
    where, kind = _path(first["loc"]), first["type"]
    if kind == "extra_forbidden":
        return _unknown_field(where, schema.NESTED[str(first["loc"][0])].model_fields)
    if kind == "missing":
        return RequestError("missing_field", f"the field '{where}' is missing", where)
    said = first["msg"][0].lower() + first["msg"][1:]
    code = "invalid_type" if kind.endswith("_type") else "invalid_value"
    return RequestError(code, f"{where} is {shown(first['input'])}: {said}", where)


def _path(loc: tuple[int | str, ...]) -> str:
    """("stop", 0) -> "stop[0]"."""
    parts = [f"[{step}]" if isinstance(step, int) else f".{step}" for step in loc]
    return "".join(parts).removeprefix(".")[:_MAX_SHOWN]


def shown(value: Any) -> str:
    if isinstance(value, list | dict) and len(value) > 8:
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)} entries"
    text = "null" if value is None else _SHORT.repr(value)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "…"
