"""Words for what pydantic found wrong: field, value, limit, and for a typo the nearest name."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from penstock.config.trtllm_fields import unknown

if TYPE_CHECKING:
    from pydantic import ValidationError

_MAX_SHOWN = 60
_WANTED = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a text",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
    "greater_than": "more than {gt}",
    "string_too_short": "a text of {min_length} or more characters",
    "string_too_long": "a text of at most {max_length} characters",
    "too_short": "{min_length} or more entries long",
    "too_long": "at most {max_length} entries long",
    "literal_error": "{expected}",
    "enum": "{expected}",
}
SECRET = {"api_key", "key", "access_config.cache_salt_secret"}
_YAML_WORDS = {None: "null", True: "true", False: "false"}


def explain(error: "ValidationError", own_names: Iterable[str]) -> str:
    """One line per mistake. `own_names`: fields of the root that TensorRT-LLM does not have."""
    return "\n".join(_line(item, own_names) for item in error.errors(include_url=False))


def _line(item: Mapping[str, Any], own_names: Iterable[str]) -> str:
    path = ".".join(str(part) for part in item["loc"])
    kind, context = item["type"], item.get("ctx", {})
    if kind == "extra_forbidden":
        return unknown(path, own_names)
    value = "not usable" if path in SECRET else shown(item["input"])
    if kind == "value_error":  # raised by a validator of ours, whose text is a whole sentence
        where = path if isinstance(item["input"], Mapping) else f"{path} is {value}"
        return f"{where}: {context['error']}"
    if kind not in _WANTED:
        return f"{path} is {value}: {item['msg']}"
    return f"{path} is {value}, it must be {_WANTED[kind].format(**context)}"


def shown(value: object) -> str:
    """The value as the user wrote it, cut when long."""
    text = _YAML_WORDS[value] if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."
