"""The lines of batch files, as OpenAI's batches have them: requests in, results out.

`penstock batch` and `/v1/batches` read and write the same. Sends nothing (see `run_lines`).
"""

import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import msgspec

from penstock.errors import RequestError
from penstock.server.body import decode_json

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
MAX_ID_CHARS = 512
MAX_SHOWN_ERRORS = 100
_FIELDS = ("custom_id", "method", "url", "body")


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One request. `number` counts the lines of the file from 1."""

    number: int
    custom_id: str
    url: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class LineError:
    """Why a line cannot be sent."""

    line: int
    code: str
    message: str
    param: str | None = None


@dataclass(frozen=True, slots=True)
class LineLimits:
    """What one line may hold. `endpoint`: the only one allowed, None for any of `ENDPOINTS`."""

    max_line_bytes: int
    max_values: int
    endpoint: str | None = None


def parse_line(data: bytes, number: int, limits: LineLimits) -> BatchLine:
    """Raises `RequestError`; what is in the body is checked by its endpoint."""
    if len(data) > limits.max_line_bytes:
        raise RequestError(
            "line_too_large",
            f"the line has {len(data)} bytes, at most {limits.max_line_bytes} are read "
            "(http_config.max_body_bytes)",
        )
    said = decode_json(data, limits.max_values)
    if not isinstance(said, dict):
        raise RequestError("invalid_type", f"the line must be an object with {', '.join(_FIELDS)}")
    for name in said:
        if name not in _FIELDS:
            raise RequestError("unknown_field", f"unknown field '{name[:80]}'", name[:80])
    custom_id, url, body = said.get("custom_id"), said.get("url"), said.get("body")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_ID_CHARS:
        raise RequestError(
            "invalid_value",
            f"custom_id must be a text of 1 to {MAX_ID_CHARS} characters",
            "custom_id",
        )
    if said.get("method", "POST") != "POST":
        raise RequestError("invalid_value", "method must be POST", "method")
    allowed = ENDPOINTS if limits.endpoint is None else (limits.endpoint,)
    if not isinstance(url, str) or url not in allowed:
        raise RequestError("invalid_url", f"url must be {' or '.join(allowed)}", "url")
    if not isinstance(body, dict):
        raise RequestError("invalid_type", "body must be an object", "body")
    if body.get("stream"):
        raise RequestError(
            "invalid_value", "stream must be left out: a result is written whole", "body.stream"
        )
    return BatchLine(number, custom_id, url, body)


def read_lines(path: Path, limits: LineLimits) -> Iterator[BatchLine]:
    """Of a file that `check_lines` found right."""
    with path.open("rb") as file:
        for number, data in _numbered(file):
            yield parse_line(data, number, limits)


def check_lines(path: Path, limits: LineLimits, max_lines: int) -> tuple[int, list[LineError]]:
    """How many requests the file has, and the first errors of it."""
    errors: list[LineError] = []
    ids: set[str] = set()
    with path.open("rb") as file:
        for number, data in _numbered(file):
            try:
                line = parse_line(data, number, limits)
                if line.custom_id in ids:
                    raise RequestError(
                        "duplicate_custom_id",
                        f"custom_id '{line.custom_id[:80]}' is that of an earlier line, too",
                        "custom_id",
                    )
                ids.add(line.custom_id)
                if len(ids) > max_lines:
                    raise RequestError(
                        "too_many_requests",
                        f"the file has more than {max_lines} requests; send it in parts",
                    )
            except RequestError as error:
                errors.append(LineError(number, error.code, error.message, error.param))
                if len(errors) >= MAX_SHOWN_ERRORS or error.code == "too_many_requests":
                    break
    if not ids and not errors:
        errors.append(LineError(1, "empty_file", "the file holds no request"))
    return len(ids), errors


def _numbered(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    for number, data in enumerate(file, 1):
        if stripped := data.strip():
            yield number, stripped


def result_line(custom_id: str, status: int, body: Any) -> bytes:
    """A request that was answered, with whatever status."""
    request_id = body.get("id") if isinstance(body, dict) else None
    response = {"status_code": status, "request_id": request_id or "", "body": body}
    return _line(custom_id, response, None)


def unsent_line(custom_id: str, code: str, message: str) -> bytes:
    """A request that was not sent before its batch ended."""
    return _line(custom_id, None, {"code": code, "message": message})


def _line(custom_id: str, response: Any, error: Any) -> bytes:
    said = {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
    return msgspec.json.encode(said) + b"\n"


class _Done(msgspec.Struct):
    custom_id: str


class ResultFile:
    """A file of result lines that grows by whole lines. What an earlier run wrote is kept, but for
    a last line that it could not finish; with `is_fresh` nothing of it is."""

    def __init__(self, path: Path, is_fresh: bool = False) -> None:
        self.done: set[str] = set()  # custom ids
        self._file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b")
        decode = msgspec.json.Decoder(_Done).decode
        size = 0
        for data in self._file:
            try:
                if not data.endswith(b"\n"):
                    break
                self.done.add(decode(data).custom_id)
            except msgspec.MsgspecError:
                break
            size += len(data)
        left = self._file.seek(0, os.SEEK_END) - size
        if left and self._has_whole_lines_after(size):
            self._file.close()
            raise RequestError(
                "not_a_result_file",
                f"{path} has a line that is no result of a batch, after {len(self.done)} that "
                "are; name another file, or delete it",
            )
        if is_fresh:
            self.done, size = set(), 0
        self._file.truncate(size)
        self._file.seek(size)

    def _has_whole_lines_after(self, offset: int) -> bool:
        """Only the last line can have been cut."""
        self._file.seek(offset)
        return any(data.endswith(b"\n") for data in self._file)

    def write(self, custom_id: str, line: bytes) -> None:
        self._file.write(line)
        self._file.flush()
        self.done.add(custom_id)

    def __len__(self) -> int:
        return len(self.done)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
