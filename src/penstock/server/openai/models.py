"""`GET /v1/models` and `GET /v1/models/{id}`: the one model this server has."""

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from penstock.server.state import ServerState, state_of


class ModelCard(msgspec.Struct, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "penstock"
    max_model_len: int


async def models(request: Request) -> Response:
    reply = {"object": "list", "data": [_card(state_of(request))]}
    return Response(msgspec.json.encode(reply), media_type="application/json")


async def model(request: Request) -> Response:
    state, asked = state_of(request), request.path_params["model"]
    if asked != state.model_name:
        raise HTTPException(404, f"there is no model '{asked}', only '{state.model_name}'")
    return Response(msgspec.json.encode(_card(state)), media_type="application/json")


def _card(state: ServerState) -> ModelCard:
    return ModelCard(
        id=state.model_name,
        created=state.created,
        max_model_len=state.pipeline.client.info.max_seq_len,
    )
