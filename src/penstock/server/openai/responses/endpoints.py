"""`/v1/responses`: a conversation's next response, whole, as a stream or in the background; what
was stored can be asked for again, continued, cancelled and deleted.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.errors import RequestError
from penstock.server.adapters import with_adapter
from penstock.server.auth import on_behalf, tenant_of
from penstock.server.body import read_body
from penstock.server.generations import Generations
from penstock.server.openai.pages import page_of
from penstock.server.openai.requests.responses import NAMES, ResponsesRequest
from penstock.server.openai.requests.schema import parse
from penstock.server.openai.requests.through_chat import told_as
from penstock.server.openai.responses.conversation import kept_items
from penstock.server.openai.responses.records import InputItemList, ResponseDeleted, ResponseObject
from penstock.server.openai.responses.responder import ResponsesResponder
from penstock.server.openai.responses.service import service_of, stored_of
from penstock.server.openai.responses.store import TenantResponses
from penstock.server.openai.responses.truncation import fitting
from penstock.server.respond import respond
from penstock.server.sse import EventStream, FramedStream
from penstock.server.state import state_of
from penstock.types.request import GenerateInput

_NUM_LISTED = 20


async def create_response(request: Request) -> Response | EventStream:
    state, service = state_of(request), service_of(request)
    known = stored_of(request) if service.store.is_on else None
    pipeline = state.pipeline
    read = await read_body(request, partial(_read, known, pipeline.client.info.default_sampling))
    asked = read.asked
    inputs = on_behalf(tenant_of(request), [read.given])
    state, [given] = await with_adapter(state, inputs, asked.model)
    with told_as(NAMES):
        if asked.truncation == "auto":
            given = await fitting(pipeline, given)
        generations = await Generations.start(
            pipeline, [given], state.metrics.observe, stream=asked.stream
        )
    stored = None if asked.store is False else known
    responder = ResponsesResponder(asked, state, generations, given.sampling, read.items, stored)
    if asked.background:
        return _json(await service.background.start(responder))
    return await respond(request, generations, responder, FramedStream if asked.stream else None)


@dataclass(frozen=True, slots=True)
class _Read:
    """`items`: of the whole conversation, as they are stored."""

    asked: ResponsesRequest
    given: GenerateInput
    items: list[dict[str, Any]]


def _read(stored: TenantResponses | None, defaults: Mapping[str, Any], body: Any) -> _Read:
    asked = parse(ResponsesRequest, body)
    if stored is None:
        _refuse_stored(asked)
    history: list[dict[str, Any]] = []
    if asked.previous_response_id is not None and stored is not None:
        history = stored.history(asked.previous_response_id)
    chat = asked.chat_request(history)
    with told_as(NAMES):
        given = chat.chat_input(defaults)
    return _Read(asked, given, [*history, *kept_items(asked.input)])


def _refuse_stored(asked: ResponsesRequest) -> None:
    for name in ("store", "background", "previous_response_id"):
        if getattr(asked, name):
            raise RequestError(
                "not_configured",
                f"{name} needs stored responses, http_config.max_stored_responses is 0",
                name,
            )


async def get_response(request: Request) -> Response:
    for name, value in request.query_params.items():
        if name == "stream" and value in ("true", "1"):
            raise RequestError(
                "unsupported",
                "a stored response is not streamed; leave out stream and ask until it has ended",
                "stream",
            )
        if name not in ("stream", "include", "include[]", "include_obfuscation"):
            raise RequestError("unknown_field", f"unknown parameter '{name[:80]}'", name[:80])
    record = await asyncio.to_thread(stored_of(request).load, _id_of(request))
    return _json(record.response)


async def delete_response(request: Request) -> Response:
    await asyncio.to_thread(stored_of(request).delete, _id_of(request))
    service_of(request).background.wake()
    return _json(ResponseDeleted(id=_id_of(request)))


async def cancel_response(request: Request) -> Response:
    """What has ended stays as it is."""
    stored, response_id = stored_of(request), _id_of(request)

    def cancel() -> ResponseObject:
        response = stored.load(response_id).response
        if not response.background:
            raise RequestError(
                "invalid_value",
                "only a response in the background can be cancelled; for others, disconnect",
            )
        if response.is_open:
            stored.cancel(response_id)
            response = stored.load(response_id).response
        return response

    response = await asyncio.to_thread(cancel)
    service_of(request).background.wake()
    return _json(response)


async def list_input_items(request: Request) -> Response:
    record = await asyncio.to_thread(stored_of(request).load, _id_of(request))
    newest_first = [_InputItem(one["id"], one) for one in reversed(record.input)]
    page = page_of(request, newest_first, ("limit", "after", "order"), _NUM_LISTED)
    return _json(
        InputItemList(
            data=[one.item for one in page.entries],
            first_id=page.first_id,
            last_id=page.last_id,
            has_more=page.has_more,
        )
    )


@dataclass(slots=True)
class _InputItem:
    id: str
    item: dict[str, Any]


def _id_of(request: Request) -> str:
    response_id: str = request.path_params["response_id"]
    return response_id


def _json(value: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
