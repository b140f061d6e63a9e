"""`/v1/files`: what batches read and write. Files of one tenant are nobody else's business."""

import asyncio
from collections.abc import AsyncGenerator

import msgspec
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response

from penstock.errors import CapacityError, RequestError
from penstock.server.batches.records import FileDeleted, FileList, FileObject
from penstock.server.batches.service import batches_of, folder_of
from penstock.server.openai.pages import page_of
from penstock.server.openai.requests.schema import shown
from penstock.server.sse import ClientGone

_FORM_SPARE_BYTES = 64 << 10  # around the file
_MAX_UPLOAD_S = 1800
_FIELDS = ("file", "purpose")
_MAX_NAME_CHARS = 256


async def upload_file(request: Request) -> Response:
    """A form with `file` and `purpose`. Written to disk as it comes."""
    service, folder = batches_of(request), folder_of(request)
    if service.uploads.locked():
        raise CapacityError("too many files are being received; try again later")
    limit = service.root.limits.max_file_bytes
    async with service.uploads:
        form = await _read_form(request, limit)
        try:
            file = _checked(form, limit)
            name = (file.filename or "upload.jsonl")[:_MAX_NAME_CHARS]
            kept = await asyncio.to_thread(folder.add_file, file.file, name, "batch")
        finally:
            await form.close()
    return _json(kept)


async def _read_form(request: Request, limit: int) -> FormData:
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise RequestError("invalid_type", "send a form (multipart/form-data)", "file")
    body = _bounded(request, limit)
    try:
        async with asyncio.timeout(_MAX_UPLOAD_S):  # few places, so nobody keeps one for long
            return await MultiPartParser(request.headers, body, max_files=1, max_fields=8).parse()
    except TimeoutError:
        said = f"the file did not arrive within {_MAX_UPLOAD_S} s; send it in parts"
        raise HTTPException(408, said, {"connection": "close"}) from None
    except (MultiPartException, KeyError) as error:
        said = getattr(error, "message", "it has no boundary")
        raise RequestError("invalid_form", f"the form cannot be read: {said}") from None
    except ClientDisconnect:
        raise ClientGone from None


def _checked(form: FormData, limit: int) -> UploadFile:
    for name in form:
        if name not in _FIELDS:
            raise RequestError("unknown_field", f"unknown field '{name[:80]}'", name[:80])
    file, purpose = form.get("file"), form.get("purpose")
    if not isinstance(file, UploadFile):
        raise RequestError("missing_field", "the form has no file in 'file'", "file")
    if purpose != "batch":
        said = purpose if isinstance(purpose, str) else None
        raise RequestError(
            "invalid_value", f"purpose is {shown(said)}, it must be batch", "purpose"
        )
    if file.size is not None and file.size > limit:
        raise _too_large(limit)
    return file


async def _bounded(request: Request, limit: int) -> AsyncGenerator[bytes, None]:
    num_bytes = 0
    async for chunk in request.stream():
        num_bytes += len(chunk)
        if num_bytes > limit + _FORM_SPARE_BYTES:
            raise _too_large(limit)
        yield chunk


def _too_large(limit: int) -> HTTPException:
    return HTTPException(
        413,
        f"the file is larger than {limit} bytes (http_config.max_file_bytes); send it in parts",
        {"connection": "close"},
    )


async def list_files(request: Request) -> Response:
    purpose = request.query_params.get("purpose")
    found = await asyncio.to_thread(folder_of(request).files)
    shown = [one for one in found if purpose is None or one.purpose == purpose]
    page = page_of(request, shown, ("limit", "after", "order", "purpose"))
    return _json(
        FileList(
            data=page.entries,
            first_id=page.first_id,
            last_id=page.last_id,
            has_more=page.has_more,
        )
    )


async def get_file(request: Request) -> Response:
    return _json(folder_of(request).file(request.path_params["file_id"]))


async def file_content(request: Request) -> Response:
    folder, file_id = folder_of(request), request.path_params["file_id"]
    path, about = folder.content_path(file_id), folder.file(file_id)
    headers = {"x-content-type-options": "nosniff"}
    # The name is the client's own; a browser saves it under one of ours.
    return FileResponse(path, 200, headers, "application/jsonl", filename=f"{about.id}.jsonl")


async def delete_file(request: Request) -> Response:
    file_id = request.path_params["file_id"]
    await asyncio.to_thread(folder_of(request).delete_file, file_id)
    return _json(FileDeleted(id=file_id))


def _json(value: FileObject | FileList | FileDeleted) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
