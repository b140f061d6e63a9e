"""Where the sockets of one server lie, and what they are called. Needs no library of sockets.

The folder is locked by the process that made it. The system drops the lock of a process that dies,
however it dies, so the next start can tell a folder that was left from one that is used.
"""

import contextlib
import fcntl
import itertools
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from typing import IO

from penstock.errors import ConfigError

_PREFIX = "penstock-"
_LOCK = "lock"
_MAX_PATH = 103  # bytes of a socket's path that every system takes; Linux 107
_LONGEST_NAME = len("/rank1023-4194304-9999")
_LONGEST_FOLDER = _MAX_PATH - _LONGEST_NAME
_OTHERS = ("/tmp", "/dev/shm")  # where the user's choice cannot be used

_serial = itertools.count()
_held: dict[str, IO[bytes]] = {}  # folder -> its lock, as long as this process lives


def private_folder() -> str:
    """A new folder for sockets that only this user may enter; removes those of dead processes."""
    bases = list(dict.fromkeys([*_chosen_base(), *_OTHERS]))
    _remove_left_ones(bases)
    reasons = []
    for base in bases:
        try:
            folder = tempfile.mkdtemp(prefix=_PREFIX, dir=base)
        except OSError as error:
            reasons.append(f"'{base}': {error.strerror or error}")
            continue
        if len(os.fsencode(folder)) <= _LONGEST_FOLDER:
            _held[folder] = _locked(folder)
            return folder
        os.rmdir(folder)
        reasons.append(f"'{base}': too long a path, sockets take {_MAX_PATH} bytes")
    raise ConfigError(
        f"no folder for the sockets between processes ({'; '.join(reasons)}); set TMPDIR to a "
        "short path that can be written"
    )


def remove(folder: str) -> None:
    """What `private_folder` made, and whatever lies in it."""
    shutil.rmtree(folder, ignore_errors=True)
    if (lock := _held.pop(folder, None)) is not None:
        lock.close()


def address(folder: str, name: str) -> str:
    return f"{folder}/{name}-{os.getpid()}-{next(_serial)}"


def folder_of(address: str) -> str:
    return os.path.dirname(address)


def _chosen_base() -> Iterator[str]:
    with contextlib.suppress(OSError):  # nothing that Python tries can be written
        yield tempfile.gettempdir()


def _locked(folder: str) -> IO[bytes]:
    """Named when it is locked, so that nobody finds it unlocked meanwhile."""
    unnamed = os.path.join(folder, f"{_LOCK}.new")
    lock = open(unnamed, "xb")  # noqa: SIM115 - held until the process ends
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.rename(unnamed, os.path.join(folder, _LOCK))
    return lock


def _remove_left_ones(bases: list[str]) -> None:
    """Folders of this user whose lock nobody holds; others stay, whatever they are."""
    for base in bases:
        with contextlib.suppress(OSError), os.scandir(base) as entries:
            for entry in entries:
                if entry.name.startswith(_PREFIX) and _is_left(entry):
                    shutil.rmtree(entry.path, ignore_errors=True)


def _is_left(entry: "os.DirEntry[str]") -> bool:
    try:
        found = entry.stat(follow_symlinks=False)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            return False
        number = os.open(os.path.join(entry.path, _LOCK), os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(number)
    return True
