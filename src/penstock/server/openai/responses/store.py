"""`ResponseStore`: responses that can be asked for again, for all API servers of a server.

A file each, in a folder that lives and goes with the server and that nobody else may enter; by
tenant, bounded, the oldest go first. What changes is replaced by a rename. Blocking: it is called
in threads where it may take long.

A response that runs in the background names its runner. Each runner holds a lock as long as its
process lives, so that a reader can tell a response that runs from one whose process has died.
"""

import fcntl
import hashlib
import os
import re
import tempfile
import threading
import uuid
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace
from starlette.exceptions import HTTPException

from penstock import log
from penstock.errors import RequestError
from penstock.server.openai.responses.records import ResponseError, StoredResponse

_ID = re.compile(r"resp_[0-9a-f]{32}")
_SWEEP_SHARE = 8  # of what may be kept is written between two looks at the folder
_log = log.get(__name__)
_decode = msgspec.json.Decoder(StoredResponse).decode


class ResponseStore:
    """`folder`: shared by all API servers; None where this is the only one. Bounds are those of one
    tenant; with 0 responses nothing is stored."""

    def __init__(self, folder: Path | None, max_responses: int, max_bytes: int) -> None:
        self.max_responses = max_responses
        self.max_bytes = max_bytes
        self._folder = folder
        self._making = threading.Lock()
        self._own_folder: tempfile.TemporaryDirectory[str] | None = None
        self._tenants: dict[str, TenantResponses] = {}
        self._runner = ""
        self._runner_fd: int | None = None

    @property
    def is_on(self) -> bool:
        return self.max_responses > 0

    def of_tenant(self, name: str) -> "TenantResponses":
        # A key may be called anything; its folder may not.
        if name not in self._tenants:
            self._tenants[name] = TenantResponses(
                self, hashlib.sha256(name.encode()).hexdigest()[:32]
            )
        return self._tenants[name]

    @property
    def folder(self) -> Path:
        """Made when something is kept first."""
        with self._making:
            if self._folder is None:
                self._own_folder = tempfile.TemporaryDirectory(prefix="penstock-responses-")
                self._folder = Path(self._own_folder.name)
            return self._folder

    @property
    def runner(self) -> str:
        """The name of this process, whose lock it holds from now on."""
        if self._runner_fd is None:
            self._runner = uuid.uuid4().hex
            path = _made(self.folder / "runners") / self._runner
            self._runner_fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._runner_fd, fcntl.LOCK_EX)
        return self._runner

    def is_running(self, runner: str) -> bool:
        try:
            fd = os.open(self.folder / "runners" / runner, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    def close(self) -> None:
        if self._runner_fd is not None:
            os.close(self._runner_fd)
            self._runner_fd = None
        if self._own_folder is not None:
            self._own_folder.cleanup()


class TenantResponses:
    """What one tenant has stored; nobody else's ids are known here."""

    def __init__(self, store: ResponseStore, name: str) -> None:
        self.store = store
        self._name = name
        self._num_unswept = self._bytes_unswept = 0

    @property
    def _path(self) -> Path:
        return self.store.folder / self._name

    def save(self, record: StoredResponse) -> bool:
        """Whether it could be: not if it is larger than all may be, or the disk is full."""
        data = msgspec.json.encode(record)
        if len(data) > self.store.max_bytes:
            return False
        try:
            _replace(self._file(record.response.id), data)
        except OSError as error:
            _log.warning("a response cannot be stored: %s", error.strerror or error)
            return False
        self._num_unswept += 1
        self._bytes_unswept += len(data)
        if (
            self._num_unswept * _SWEEP_SHARE >= self.store.max_responses
            or self._bytes_unswept * _SWEEP_SHARE >= self.store.max_bytes
        ):
            self._sweep()
        return True

    def load(self, response_id: str) -> StoredResponse:
        """With its status as it is now, whoever runs it."""
        try:
            if not _ID.fullmatch(response_id):
                raise FileNotFoundError
            record = _decode(self._file(response_id).read_bytes())
        except FileNotFoundError:
            raise HTTPException(
                404,
                f"there is no response '{response_id[:80]}'; it was not stored, was deleted, or "
                "has made room for newer ones",
            ) from None
        response = record.response
        if response.is_open and self.is_cancelled(response_id):
            response.status = "cancelled"
        elif response.is_open and not self.store.is_running(record.runner):
            response.status = "failed"
            response.error = ResponseError(
                code="server_error", message="the process that ran it has ended"
            )
        return record

    def history(self, response_id: str) -> list[dict[str, Any]]:
        """The conversation up to and with a response that has ended, as items."""
        try:
            record = self.load(response_id)
        except HTTPException as error:
            raise RequestError(
                "previous_response_not_found", error.detail, "previous_response_id"
            ) from None
        if record.response.status not in ("completed", "incomplete"):
            raise RequestError(
                "invalid_value",
                f"previous_response_id is a response that is {record.response.status}; only one "
                "that has ended by itself can be continued",
                "previous_response_id",
            )
        output: list[dict[str, Any]] = msgspec.to_builtins(record.response.output)
        return [*record.input, *output]

    def delete(self, response_id: str) -> None:
        """One that still runs is ended, too."""
        if self.load(response_id).response.is_open:
            self.cancel(response_id)
        self._file(response_id).unlink(missing_ok=True)

    def cancel(self, response_id: str) -> None:
        """Tells its runner, wherever that is."""
        marker = self._marker(response_id)
        os.close(os.open(marker, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))

    def is_cancelled(self, response_id: str) -> bool:
        return self._marker(response_id).exists()

    def finish(self, record: StoredResponse) -> None:
        """The last word of its runner, unless it was deleted meanwhile. Who was told that it is
        cancelled is not told something else later."""
        response = record.response
        if not self.is_cancelled(response.id):
            self.save(record)
        elif self._file(response.id).exists():
            response = replace(response, status="cancelled", error=None, completed_at=None)
            self.save(replace(record, response=response))
        self._marker(response.id).unlink(missing_ok=True)

    def _file(self, response_id: str) -> Path:
        return self._path / f"{response_id}.json"

    def _marker(self, response_id: str) -> Path:
        return self._path / f"{response_id}.cancel"

    def _sweep(self) -> None:
        """Down to somewhat less than the bounds, since it comes only now and then."""
        self._num_unswept = self._bytes_unswept = 0
        found = []
        with os.scandir(self._path) as entries:
            for entry in entries:
                try:
                    state = entry.stat()
                except FileNotFoundError:
                    continue  # another process was faster
                found.append((state.st_mtime_ns, state.st_size, entry.path))
        found.sort(reverse=True)
        max_responses, max_bytes = self.store.max_responses, self.store.max_bytes
        bytes_kept = 0
        for num_kept, (_, size, path) in enumerate(found, start=1):
            bytes_kept += size
            is_over = (
                num_kept > max(1, max_responses - max_responses // _SWEEP_SHARE)
                or bytes_kept > max_bytes - max_bytes // _SWEEP_SHARE
            )
            if is_over and num_kept > 1:
                Path(path).unlink(missing_ok=True)


def _replace(path: Path, data: bytes) -> None:
    fresh = _made(path.parent) / f"{path.name}.{uuid.uuid4().hex}"
    try:
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        os.replace(fresh, path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise


def _made(folder: Path) -> Path:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder
