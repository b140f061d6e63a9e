"""`/v1/batches`: files of requests that run behind the others. `batches/worker` runs them."""

import asyncio
import time

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.server.auth import tenant_of
from penstock.server.batches.records import BatchList, BatchObject, BatchState, new_batch_id
from penstock.server.batches.service import batches_of, folder_of
from penstock.server.body import read_body
from penstock.server.openai.pages import page_of
from penstock.server.openai.requests.batches import BatchRequest
from penstock.server.openai.requests.schema import parse

_WINDOW_S = {"24h": 86400}
_NUM_LISTED = 20


async def create_batch(request: Request) -> Response:
    service, folder = batches_of(request), folder_of(request)
    asked = await read_body(request, lambda body: parse(BatchRequest, body))
    now = int(time.time())
    batch = BatchObject(
        id=new_batch_id(),
        endpoint=asked.endpoint,
        input_file_id=asked.input_file_id,
        completion_window=asked.completion_window,
        created_at=now,
        expires_at=now + _WINDOW_S[asked.completion_window],
        metadata=asked.metadata,
    )

    def add() -> None:
        folder.file(asked.input_file_id)
        folder.check_room_for_results()
        folder.add_batch(BatchState(batch=batch, tenant=tenant_of(request).name))

    await asyncio.to_thread(add)
    service.worker.wake()
    return _json(batch)


async def list_batches(request: Request) -> Response:
    states = await asyncio.to_thread(folder_of(request).batches)
    found = [one.batch for one in states]
    page = page_of(request, found, ("limit", "after"), _NUM_LISTED)
    return _json(
        BatchList(
            data=page.entries,
            first_id=page.first_id,
            last_id=page.last_id,
            has_more=page.has_more,
        )
    )


async def get_batch(request: Request) -> Response:
    return _json(folder_of(request).batch(request.path_params["batch_id"]).batch)


async def cancel_batch(request: Request) -> Response:
    """What is done stays, in the batch's files."""
    batches_of(request).worker.wake()
    return _json(folder_of(request).cancel(request.path_params["batch_id"]).batch)


def _json(value: BatchObject | BatchList) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
