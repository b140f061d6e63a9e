"""`GET /v1/models` and `GET /v1/models/{id}`: the model this server has, and its adapters."""

import msgspec
from msgspec import UNSET, UnsetType
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
    parent: str | UnsetType = UNSET  # of an adapter: the model that it changes


async def models(request: Request) -> Response:
    state = state_of(request)
    names = [state.model_name, *(one.name for one in state.adapters.all())]
    reply = {"object": "list", "data": [_card(state, name) for name in names]}
    return Response(msgspec.json.encode(reply), media_type="application/json")


async def model(request: Request) -> Response:
    state, asked = state_of(request), request.path_params["model"]
    if asked != state.model_name and state.adapters.find(asked) is None:
        raise HTTPException(404, f"there is no model '{asked}', only '{state.model_name}'")
    return Response(msgspec.json.encode(_card(state, asked)), media_type="application/json")


def _card(state: ServerState, name: str) -> ModelCard:
    return ModelCard(
        id=name,
        created=state.created,
        max_model_len=state.pipeline.client.info.max_seq_len,
        parent=UNSET if name == state.model_name else state.model_name,
    )
