"""`BackgroundResponses`: responses that run on after their request was answered.

They are requests to the engine as others are, and count as such. They end with the server: nobody
could ask for them afterwards.
"""

import asyncio
from contextlib import aclosing

from msgspec.structs import replace

from penstock import log
from penstock.errors import RequestError
from penstock.server.openai.responses.records import ResponseObject
from penstock.server.openai.responses.responder import ResponsesResponder
from penstock.server.sse import explain_failure

_POLL_S = 0.25  # until one that another API server was told to cancel is ended
_log = log.get(__name__)


class BackgroundResponses:
    def __init__(self) -> None:
        self._running: dict[str, _Running] = {}  # by id
        self._watch: asyncio.Task[None] | None = None
        self._woken = asyncio.Event()

    async def start(self, responder: ResponsesResponder) -> ResponseObject:
        """The response as it is now. Whatever happens, its generations are closed."""
        try:
            begun = await self._store_begun(responder)
        except BaseException:
            await responder.generations.aclose()
            raise
        running = _Running(responder)
        running.task.add_done_callback(lambda _: self._running.pop(begun.id, None))
        self._running[begun.id] = running
        if self._watch is None or self._watch.done():
            self._watch = asyncio.create_task(self._end_cancelled())
        return begun

    async def _store_begun(self, responder: ResponsesResponder) -> ResponseObject:
        stored = responder.stored
        assert stored is not None, "a request that is not stored was refused"
        record = responder.record(responder.begun)
        record.runner = stored.store.runner
        if not await asyncio.to_thread(stored.save, record):
            raise RequestError(
                "invalid_value",
                "the conversation cannot be stored, so it cannot run in the background; it may be "
                "larger than http_config.max_stored_response_bytes",
                "background",
            )
        return replace(responder.begun, status="queued")

    def wake(self) -> None:
        """One was cancelled here; those of others are found in time."""
        self._woken.set()

    async def aclose(self) -> None:
        tasks = [one.task for one in self._running.values()]
        tasks += [] if self._watch is None else [self._watch]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _end_cancelled(self) -> None:
        """Looks for those that any API server was told to cancel, while some run."""
        while self._running:
            self._woken.clear()
            running = list(self._running.values())
            for one in await asyncio.to_thread(_cancelled, running):
                one.task.cancel()
            try:
                await asyncio.wait_for(self._woken.wait(), _POLL_S)
            except TimeoutError:
                pass


def _cancelled(running: list["_Running"]) -> list["_Running"]:
    return [one for one in running if one.is_cancelled()]


class _Running:
    def __init__(self, responder: ResponsesResponder) -> None:
        assert responder.stored is not None
        self._responder = responder
        self._stored = responder.stored
        self.task = asyncio.create_task(self._run())

    def is_cancelled(self) -> bool:
        return self._stored.is_cancelled(self._responder.id)

    async def _run(self) -> None:
        try:
            response = await self._response()
            await asyncio.to_thread(self._stored.finish, self._responder.record(response))
        except Exception as error:  # such as a disk that is full
            _log.error("response %s cannot be stored", self._responder.id, exc_info=error)

    async def _response(self) -> ResponseObject:
        responder = self._responder
        try:
            async with aclosing(responder.generations):
                return await responder.collected()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self.is_cancelled() or task is None:
                raise  # the server is leaving
            task.uncancel()
            return replace(responder.begun, status="cancelled")
        except Exception as error:
            return responder.failed(explain_failure(error))
