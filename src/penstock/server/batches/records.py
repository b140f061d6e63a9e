"""The objects of `/v1/files` and `/v1/batches` as clients of OpenAI's API read them, and what is
kept of a batch on disk. Field order is key order.
"""

import re
import uuid

import msgspec

OPEN_STATUSES = frozenset(("validating", "in_progress", "finalizing", "cancelling"))
_ID = re.compile(r"(file-|batch_)[0-9a-f]{32}")


class FileObject(msgspec.Struct, kw_only=True):
    id: str
    object: str = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: str = "processed"


class FileDeleted(msgspec.Struct, kw_only=True):
    id: str
    object: str = "file"
    deleted: bool = True


class FileList(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class BatchError(msgspec.Struct, kw_only=True):
    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchErrors(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[BatchError]


class RequestCounts(msgspec.Struct, kw_only=True):
    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchObject(msgspec.Struct, kw_only=True):
    id: str
    object: str = "batch"
    endpoint: str
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: str
    status: str = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = msgspec.field(default_factory=RequestCounts)
    metadata: dict[str, str] | None = None

    @property
    def is_open(self) -> bool:
        return self.status in OPEN_STATUSES


class BatchList(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class BatchState(msgspec.Struct, kw_only=True):
    """A batch on disk. `is_running` is left set by a process that ended in the middle of it."""

    batch: BatchObject
    tenant: str
    is_running: bool = False
    num_interruptions: int = 0


def new_file_id() -> str:
    return f"file-{uuid.uuid4().hex}"


def new_batch_id() -> str:
    return f"batch_{uuid.uuid4().hex}"


def result_file_id(batch_id: str, kind: str) -> str:
    """Of the results or errors of a batch: the same whenever it is asked for."""
    return f"file-{uuid.uuid5(uuid.NAMESPACE_OID, f'{batch_id}/{kind}').hex}"


def is_id(text: str) -> bool:
    """Whether it may be the name of a file in our folders."""
    return _ID.fullmatch(text) is not None
