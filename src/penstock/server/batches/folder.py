"""Folders of files and batches: `FilesRoot` for a server, in it a `TenantFolder` for each tenant.

What is there is shared by all API servers of a server, and by servers of the same model that use
the same folder: whatever changes is replaced by a rename, and what counts is counted under a lock.
Only the process that has `leader_lock` runs batches. Nobody but the owner may read any of it.
"""

import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec
from starlette.exceptions import HTTPException

from penstock import log
from penstock.errors import ConfigError, RequestError
from penstock.server.batches.records import BatchState, FileObject, is_id, new_file_id

MAX_OPEN_BATCHES = 16  # of one tenant
_COPY_BYTES = 1 << 20
_log = log.get(__name__)
T = TypeVar("T")
_decode_file = msgspec.json.Decoder(FileObject).decode
_decode_batch = msgspec.json.Decoder(BatchState).decode


@dataclass(frozen=True, slots=True)
class FileLimits:
    """Of one tenant: the settings of the same names in `http_config`."""

    max_file_bytes: int
    max_files: int
    max_stored_bytes: int


class FilesRoot:
    """`path` need not exist before something is kept in it."""

    def __init__(self, path: Path, limits: FileLimits) -> None:
        self.path = path
        self.limits = limits
        self._lock_fd: int | None = None

    def of_tenant(self, name: str) -> "TenantFolder":
        # A key may be called anything; its folder may not.
        return TenantFolder(self.path / hashlib.sha256(name.encode()).hexdigest()[:32], self.limits)

    def folders(self) -> list["TenantFolder"]:
        if not self.path.is_dir():
            return []
        return [
            TenantFolder(one, self.limits) for one in sorted(self.path.iterdir()) if one.is_dir()
        ]

    def take_leader_lock(self) -> bool:
        """Whether this process runs the batches; it stays so until `close`, or its end."""
        if self._lock_fd is not None:
            return True
        if not self.path.is_dir():
            return False
        make_private(self.path)
        fd = os.open(self.path / "leader.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        self._lock_fd = fd
        return True

    def close(self) -> None:
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None


class TenantFolder:
    def __init__(self, path: Path, limits: FileLimits) -> None:
        self._path = path
        self._files = path / "files"
        self._batches = path / "batches"
        self._limits = limits

    # Files

    def files(self) -> list[FileObject]:
        """The newest first."""
        found = _readable(_listed(self._files, "*.json"), _read_file)
        return sorted(found, key=lambda one: (one.created_at, one.id), reverse=True)

    def file(self, file_id: str) -> FileObject:
        path = self._files / f"{file_id}.json"
        for found in _readable([path] if is_id(file_id) else [], _read_file):
            return found
        raise HTTPException(404, f"there is no file '{file_id[:80]}'")

    def content_path(self, file_id: str) -> Path:
        self.file(file_id)
        return self._files / f"{file_id}.data"

    def add_file(self, source: BinaryIO, filename: str, purpose: str) -> FileObject:
        """Copies it, within the limits of the tenant."""
        num_bytes = source.seek(0, os.SEEK_END)
        source.seek(0)
        with self._locked():
            self._check_room(num_bytes)
            file_id = new_file_id()
            path = self._files / f"{file_id}.data"
            try:
                with _private_file(path) as file:
                    shutil.copyfileobj(source, file, _COPY_BYTES)
            except OSError as error:
                path.unlink(missing_ok=True)
                raise HTTPException(507, f"the file cannot be kept: {error.strerror}") from None
            return self._describe(file_id, filename, purpose)

    def adopt_file(self, path: Path, file_id: str, filename: str) -> FileObject | None:
        """Results of a batch, which are moved here; None where there are none. May be done again
        by whoever goes on with a batch."""
        target = self._files / f"{file_id}.data"
        if path.is_file():
            if path.stat().st_size == 0:
                return None
            self._make()
            os.replace(path, target)
        return self._describe(file_id, filename, "batch_output") if target.is_file() else None

    def reclaim_file(self, path: Path, file_id: str) -> None:
        """Undoes `adopt_file` for a batch that goes on."""
        target = self._files / f"{file_id}.data"
        if target.is_file() and not path.exists():
            (self._files / f"{file_id}.json").unlink(missing_ok=True)
            os.replace(target, path)

    def delete_file(self, file_id: str) -> None:
        self.file(file_id)
        for state in self.batches():
            if state.batch.input_file_id == file_id and state.batch.is_open:
                raise RequestError(
                    "file_in_use", f"'{file_id}' is the input of {state.batch.id}; cancel it first"
                )
        (self._files / f"{file_id}.json").unlink(missing_ok=True)
        (self._files / f"{file_id}.data").unlink(missing_ok=True)

    def check_room_for_results(self) -> None:
        self._check_room(0)

    def _check_room(self, num_bytes: int) -> None:
        limits, files = self._limits, self.files()
        if len(files) >= limits.max_files:
            raise RequestError(
                "too_many_files",
                f"{len(files)} files are kept, at most {limits.max_files} "
                "(http_config.max_files) may be; delete some",
                "file",
            )
        kept = sum(one.bytes for one in files)
        if kept + num_bytes > limits.max_stored_bytes:
            raise RequestError(
                "storage_full",
                f"{kept} bytes are kept and {num_bytes} more would be over "
                f"{limits.max_stored_bytes} (http_config.max_stored_bytes); delete some files",
                "file",
            )

    def _describe(self, file_id: str, filename: str, purpose: str) -> FileObject:
        num_bytes = (self._files / f"{file_id}.data").stat().st_size
        described = FileObject(
            id=file_id,
            bytes=num_bytes,
            created_at=int(time.time()),
            filename=filename,
            purpose=purpose,
        )
        _replace(self._files / f"{file_id}.json", msgspec.json.encode(described))
        return described

    # Batches

    def batches(self) -> list[BatchState]:
        """The newest first."""
        found = _readable(_listed(self._batches, "*/state.json"), _read_batch)
        return sorted(found, key=lambda one: (one.batch.created_at, one.batch.id), reverse=True)

    def open_batches(self, known_ended: set[str]) -> list[BatchState]:
        """Those that have not ended; `known_ended` are not looked at, and grow."""
        paths = _listed(self._batches, "*/state.json")
        found = _readable((one for one in paths if one.parent.name not in known_ended), _read_batch)
        known_ended.update(one.batch.id for one in found if not one.batch.is_open)
        return [one for one in found if one.batch.is_open]

    def batch(self, batch_id: str) -> BatchState:
        path = self._batches / batch_id / "state.json"
        for found in _readable([path] if is_id(batch_id) else [], _read_batch):
            return found
        raise HTTPException(404, f"there is no batch '{batch_id[:80]}'")

    def batch_folder(self, batch_id: str) -> Path:
        return self._batches / batch_id

    def add_batch(self, state: BatchState) -> None:
        with self._locked():
            kept = self.batches()
            if sum(one.batch.is_open for one in kept) >= MAX_OPEN_BATCHES:
                raise RequestError(
                    "too_many_batches",
                    f"{MAX_OPEN_BATCHES} batches are not done yet, no more are taken; wait or "
                    "cancel one",
                )
            ended = [one for one in kept if not one.batch.is_open]
            for old in ended[self._limits.max_files - 1 :]:  # its files stay
                shutil.rmtree(self._batches / old.batch.id, ignore_errors=True)
            (self._batches / state.batch.id).mkdir(mode=0o700)
            self.save(state)

    def save(self, state: BatchState) -> None:
        """By who made it, and then only by the process that runs batches."""
        _replace(self._batches / state.batch.id / "state.json", msgspec.json.encode(state))

    def cancel(self, batch_id: str) -> BatchState:
        """Asks whoever runs it; what has ended stays as it is."""
        if self.batch(batch_id).batch.is_open:
            marker = self._batches / batch_id / "cancel"
            os.close(os.open(marker, os.O_WRONLY | os.O_CREAT, 0o600))
        return self.batch(batch_id)

    def is_cancelled(self, batch_id: str) -> bool:
        return (self._batches / batch_id / "cancel").exists()

    def _make(self) -> None:
        make_private(self._path.parent)
        for folder in (self._path, self._files, self._batches):
            folder.mkdir(mode=0o700, exist_ok=True)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self._make()
        with _private_file(self._path / "lock") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def make_private(path: Path) -> None:
    """A folder that nobody else may look into; one that others may is refused."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.stat()
    except OSError as error:
        raise ConfigError(
            f"files cannot be kept in {path}: {error.strerror or error}; set "
            "http_config.files_dir to a folder that can be written, or max_file_bytes to 0"
        ) from None
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(
            f"files cannot be kept in {path}: others may read it; chmod 700 it, or set "
            "http_config.files_dir to another"
        )


def _private_file(path: Path) -> BinaryIO:
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b")


def _read_file(path: Path) -> FileObject:
    return _decode_file(path.read_bytes())


def _read_batch(path: Path) -> BatchState:
    state = _decode_batch(path.read_bytes())
    marker = path.with_name("cancel")
    if state.batch.is_open and marker.exists():
        state.batch.status = "cancelling"
        state.batch.cancelling_at = int(marker.stat().st_mtime)
    return state


def _readable(paths: Iterable[Path], read: Callable[[Path], T]) -> list[T]:
    """Without what has just been deleted, or was not whole on disk when the power went."""
    found = []
    for path in paths:
        try:
            found.append(read(path))
        except (FileNotFoundError, msgspec.MsgspecError) as error:
            _log.debug("%s is left out: %s", path, error)
    return found


def _replace(path: Path, content: bytes) -> None:
    fresh = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}")
    with _private_file(fresh) as file:
        file.write(content)
    os.replace(fresh, path)


def _listed(folder: Path, pattern: str) -> list[Path]:
    return [one for one in folder.glob(pattern) if not one.name.startswith(".")]
