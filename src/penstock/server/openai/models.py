"""`GET /v1/models`: the one model this server has."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.server.state import state_of


class ModelCard(msgspec.Struct, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "penstock"
    max_model_len: int


async def models(request: Request) -> Response:
    state = state_of(request)
    card = ModelCard(
        id=state.model_name,
        created=state.created,
        max_model_len=state.pipeline.client.info.max_seq_len,
    )
    reply = {"object": "list", "data": [card]}
    return Response(msgspec.json.encode(reply), media_type="application/json")
