"""Small files of a model folder: read whole, within limits, or refused in words. Needs no torch.

A folder may come from anywhere. What would hang (a pipe, a device), fill the memory or overflow a
parser's stack is a `ConfigError` that names the file. What its fields mean is the reader's part.
"""

import json
import stat
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError

_MAX_BYTES = 1 << 26  # the weight index of the largest models has some 10 MB
_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


def require_regular(path: Path) -> None:
    """Refuse what exists and is no file with contents of its own: to open it might never return."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise ConfigError(f"cannot read '{path}': {error.strerror or error}") from None
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "no regular file")
        raise ConfigError(f"'{path}' is {kind}; put a regular file in its place")


def has_file(path: Path) -> bool:
    """Whether there is a regular file; something else in its place is refused."""
    if not path.exists():
        return False
    require_regular(path)
    return True


def read_text(path: Path) -> str:
    require_regular(path)
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise ConfigError(f"'{path}' is larger than {_MAX_BYTES >> 20} MiB, which none is")
        return content.decode()
    except OSError as error:
        raise ConfigError(f"cannot read '{path}': {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"'{path}' is not UTF-8 text: {error}; fetch it again") from error


def read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """The object in the file; {} where `optional` and it is not there."""
    if optional and not path.exists():
        return {}
    try:
        fields = json.loads(read_text(path))
    except RecursionError:
        raise ConfigError(f"'{path}' is nested too deeply; fetch it again") from None
    except ValueError as error:
        raise ConfigError(f"'{path}' is not JSON: {error}; fetch it again") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"'{path}' holds no JSON object; fetch it again")
    return fields
