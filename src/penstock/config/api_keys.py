"""Reads the file of API keys and the cache secret: what is secret, and what each key may have.

Nothing of it is part of `EngineConfig`, so none of it is dumped, shown or sent to the engine.
"""

import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, field_validator

from penstock import log
from penstock.config.base import StrictModel
from penstock.config.messages import explain
from penstock.config.schema import EngineConfig
from penstock.config.yaml_file import read_yaml
from penstock.errors import ConfigError

MAX_KEYS = 1024
API_KEY_NAME = "api_key"  # of the one that is set by `api_key`
_MIN_KEY_CHARS = 16
_MIN_SECRET_BYTES = 16
_MAX_FILE_BYTES = 4 << 20
_log = log.get(__name__)


class KeyEntry(StrictModel):
    """One entry of the file, by its name."""

    key: str = Field(min_length=_MIN_KEY_CHARS, max_length=4096, repr=False)
    weight: float = Field(default=1.0, ge=0.001, le=1000.0)
    allow_priority: bool = False
    allow_metrics: bool = False
    max_queued_requests: int | None = Field(default=None, ge=1, le=2**20)
    max_queued_tokens: int | None = Field(default=None, ge=1, le=2**40)
    cache_group: str | None = Field(default=None, min_length=1, max_length=256)

    @field_validator("key")
    @classmethod
    def _can_be_sent(cls, value: str) -> str:
        if not value.isascii() or not value.isprintable() or " " in value:
            raise ValueError("it must consist of visible ASCII characters")
        return value


@dataclass(frozen=True, slots=True)
class NamedKey:
    name: str
    entry: KeyEntry = field(repr=False)


def read_keys(config: EngineConfig) -> list[NamedKey]:
    """All keys of a server, `api_key` first; none: everybody may ask."""
    keys = []
    access = config.access_config
    if config.api_key is not None:
        entry = KeyEntry.model_construct(
            key=config.api_key, allow_priority=access.allow_priority, allow_metrics=True
        )
        keys.append(NamedKey(API_KEY_NAME, entry))
    if access.api_keys_file is not None:
        keys += _read_file(Path(access.api_keys_file).expanduser())
    names: dict[str, str] = {}
    for one in keys:
        if (other := names.setdefault(one.entry.key, one.name)) is not one.name:
            raise ConfigError(f"'{other}' and '{one.name}' have the same key; give each its own")
    return keys


def read_secret(config: EngineConfig) -> bytes | None:
    access = config.access_config
    if access.cache_salt_secret is not None:
        return access.cache_salt_secret.encode()
    if access.cache_salt_secret_file is None:
        return None
    path = Path(access.cache_salt_secret_file).expanduser()
    _check_file(path, "cache_salt_secret_file")
    secret = path.read_bytes().strip()
    if len(secret) < _MIN_SECRET_BYTES:
        raise ConfigError(
            f"{path} holds {len(secret)} bytes, a secret has at least {_MIN_SECRET_BYTES}; make "
            "one with 'openssl rand -hex 32'"
        )
    return secret


def _read_file(path: Path) -> list[NamedKey]:
    _check_file(path, "api_keys_file")
    values = read_yaml(path)
    if not 0 < len(values) <= MAX_KEYS:
        raise ConfigError(f"{path} has {len(values)} keys, it must be 1 to {MAX_KEYS}")
    return [NamedKey(*_entry(path, name, value)) for name, value in values.items()]


def _entry(path: Path, name: Any, value: Any) -> tuple[str, KeyEntry]:
    if not isinstance(name, str) or not 0 < len(name) <= 256 or name == API_KEY_NAME:
        raise ConfigError(
            f"{path}: {name!r} is no name of a key; use a text of at most 256 characters other "
            f"than '{API_KEY_NAME}'"
        )
    if not isinstance(value, str | Mapping):
        raise ConfigError(
            f"{path}: '{name}' must be a key, or a mapping such as {{key: ..., weight: 2}}; put a "
            "key of digits in quotes"
        )
    try:
        return name, KeyEntry.model_validate({"key": value} if isinstance(value, str) else value)
    except ValidationError as error:
        said = explain(error, KeyEntry.model_fields)
        raise ConfigError(f"{path}: '{name}': {said}") from None


def _check_file(path: Path, setting: str) -> None:
    """A plain file of modest size; a warning where others may read or change it."""
    try:
        found = path.stat()
    except OSError as error:
        raise ConfigError(f"cannot read {setting} {path}: {error.strerror or error}") from None
    if not stat.S_ISREG(found.st_mode) or found.st_size > _MAX_FILE_BYTES:
        raise ConfigError(f"{setting} {path} must be a plain file of at most {_MAX_FILE_BYTES} B")
    if found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        _log.warning(
            "%s %s may be read or changed by other users (mode %03o); chmod 600 it",
            setting, path, stat.S_IMODE(found.st_mode),
        )  # fmt: skip
