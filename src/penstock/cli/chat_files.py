"""What a chat keeps on disk: the lines typed before, and conversations saved by name.

Both are private: only this user may read them.
"""

import json
import os
from pathlib import Path

from penstock.errors import ConfigError
from penstock.hub.folder import cache_home

_ROLES = ("system", "user", "assistant")
_MAX_CONVERSATION_BYTES = 16 * 2**20
_MAX_HISTORY_BYTES = 2**20
_ENTRY = b"\n# "  # the line with a time that begins an entry of prompt_toolkit's file
_PRIVATE = 0o600

Messages = list[dict[str, str]]


def history_file() -> Path | None:
    """The file of what was typed, short enough to be read at each start; None: cannot be had."""
    path = cache_home() / "chat_history"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_RDWR, _PRIVATE))
        path.chmod(_PRIVATE)
        if path.stat().st_size > _MAX_HISTORY_BYTES:
            newest = path.read_bytes()[-_MAX_HISTORY_BYTES // 2 :]
            _replace(path, newest[max(newest.find(_ENTRY), 0) :])
    except OSError:
        return None
    return path


def save(path: Path, model: str, messages: Messages) -> None:
    """Over a conversation saved before, but over nothing else."""
    if path.exists():
        try:
            load(path)
        except ConfigError:
            raise ConfigError(f"{path} is there and is no saved conversation; it is left") from None
    text = json.dumps({"model": model, "messages": messages}, indent=1, ensure_ascii=False)
    try:
        _replace(path, text.encode())
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from None


def load(path: Path) -> Messages:
    """The messages of a saved conversation, or of the body of a chat request."""
    try:
        if path.stat().st_size > _MAX_CONVERSATION_BYTES:
            raise ConfigError(f"{path} has more than {_MAX_CONVERSATION_BYTES:,} bytes")
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError:
        raise ConfigError(f"{path} is not JSON; /save writes such a file") from None
    messages = found.get("messages") if isinstance(found, dict) else found
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise ConfigError(
            f"{path} holds no conversation: a list of messages, each with a role "
            f"({', '.join(_ROLES)}) and a content that is text"
        )
    return [{"role": one["role"], "content": one["content"]} for one in messages]


def _is_message(one: object) -> bool:
    return (
        isinstance(one, dict) and one.get("role") in _ROLES and isinstance(one.get("content"), str)
    )


def _replace(path: Path, content: bytes) -> None:
    """Whole or not at all."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with os.fdopen(
            os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_WRONLY, _PRIVATE), "wb"
        ) as file:
            file.write(content)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
