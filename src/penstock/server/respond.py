"""`respond`: what a client gets of its generations: events while they run, or one JSON body."""

from collections.abc import Callable
from contextlib import aclosing
from typing import Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from penstock.server.access_log import tell_access_log
from penstock.server.generations import Generations
from penstock.server.sse import EventStream, until_disconnect


class Replier(Protocol):
    @property
    def id(self) -> str: ...

    async def reply(self) -> bytes:
        """The whole body, once the generations have ended."""


R = TypeVar("R", bound=Replier)


async def respond(
    request: Request,
    generations: Generations,
    responder: R,
    stream: Callable[[Generations, R], EventStream] | None,
) -> Response | EventStream:
    """`stream`: what writes the events, where the client wants them."""
    tell_access_log(request.scope, responder.id, generations)
    if stream is not None:
        return stream(generations, responder)
    async with aclosing(generations):
        reply = await until_disconnect(request.receive, responder.reply())
    return Response(reply, media_type="application/json")
