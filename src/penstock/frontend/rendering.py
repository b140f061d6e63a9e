"""Messages -> the parts of a prompt, wherever that happens. `TemplateProcess` is for templates that
come with a model: programs of strangers, which get a process of their own, a deadline and little
memory. Knows nothing of tokens; what the process runs is `template_worker`.
"""

import asyncio
import socket
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from penstock import log
from penstock.errors import (
    BackendError,
    CapacityError,
    ConfigError,
    PenstockError,
    RequestError,
)
from penstock.frontend.template_frames import HEAD, Load, Render, Rendered, framed
from penstock.ipc.process import Child
from penstock.types.request import ChatOptions

Messages = Sequence[Mapping[str, Any]]

RENDER_DEADLINE_S = 5.0  # a long conversation takes some 10 ms
LOAD_DEADLINE_S = 30.0  # with the start of the process, on a machine that is busy with a model
_MAX_WAIT_S = 60.0
_MAX_JOBS = 1024
_MAX_BYTES = 256 << 20
_NUM_AHEAD = 32  # sent before their turn, so that the process need not wait for the event loop
_BYTES_PER_CHAR = 6  # of JSON, at most
_SPARE_BYTES = 1 << 16
_SMALL_BYTES = 16 << 10  # of messages; rendered in less than a millisecond
_GRACE_S = 0.1
_NUM_LOOKS, _LOOK_S = 400, 0.005
_WAY_OUT = "name another one with --chat_template"
_BROKEN = "broke the process that renders it"
_decode = msgspec.json.Decoder(Rendered).decode
_encode = msgspec.json.Encoder().encode
_log = log.get(__name__)


class Renderer(Protocol):
    async def parts(self, messages: Messages, options: ChatOptions, max_chars: int) -> list[str]:
        """The prompt in the pieces it is tokenized in; `RequestError` if it cannot be made."""

    async def aclose(self) -> None: ...


class Template(Protocol):
    def parts(self, messages: Messages, options: ChatOptions, max_chars: int) -> list[str]: ...


@dataclass(frozen=True, slots=True)
class TemplateTexts:
    """Templates by name, not yet compiled, and the tokens that they may write. None: each request
    brings its own."""

    templates: Mapping[str, str]
    special_tokens: Mapping[str, str]


class InProcess:
    """A template of our own code, which ends and takes no more than its messages."""

    def __init__(self, template: Template) -> None:
        self._template = template

    async def parts(self, messages: Messages, options: ChatOptions, max_chars: int) -> list[str]:
        if len(_encoded(messages)) <= _SMALL_BYTES:
            return self._template.parts(messages, options, max_chars)
        return await asyncio.to_thread(self._template.parts, messages, options, max_chars)

    async def aclose(self) -> None:
        pass


async def start_renderer(template: TemplateTexts | Template | None) -> Renderer | None:
    if not isinstance(template, TemplateTexts):
        return None if template is None else InProcess(template)
    process = TemplateProcess(template)
    await process.start()
    return process


@dataclass(eq=False, slots=True)
class _Job:
    data: bytes
    answer: "asyncio.Future[Rendered]"
    max_reply_bytes: int
    deadline_s: float


class TemplateProcess:
    """One process, which renders one request after the other, and is started again after one that
    did not end or broke it. The others are not affected: they are sent to the next process.
    """

    def __init__(
        self,
        texts: TemplateTexts,
        render_deadline_s: float = RENDER_DEADLINE_S,
        load_deadline_s: float = LOAD_DEADLINE_S,
    ) -> None:
        self._texts = texts
        self._render_deadline_s = render_deadline_s
        self._load_deadline_s = load_deadline_s
        self._waiting: deque[_Job] = deque()
        self._sent: deque[_Job] = deque()
        self._num_bytes = 0  # of jobs that are not done
        self._link: _TemplateLink | None = None
        self._is_ready = False
        self._starting: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        return None if self._link is None else self._link.child.pid

    async def start(self) -> None:
        """`ConfigError` for a template that cannot be compiled, or not within the limits."""
        try:
            await self._start()
        except BaseException:
            await self.aclose()
            raise

    async def parts(self, messages: Messages, options: ChatOptions, max_chars: int) -> list[str]:
        data = framed(_encoded(Render(messages=messages, options=options, max_chars=max_chars)))
        num_jobs = len(self._waiting) + len(self._sent)
        if num_jobs >= _MAX_JOBS or self._num_bytes + len(data) > _MAX_BYTES:
            raise CapacityError(f"{num_jobs} chat requests wait to be rendered; try again later")
        job = self._job(data, max_chars * _BYTES_PER_CHAR + _SPARE_BYTES, self._render_deadline_s)
        self._num_bytes += len(data)
        self._waiting.append(job)
        timer = asyncio.get_running_loop().call_later(_MAX_WAIT_S, _give_up, job.answer)
        try:
            self._send()
            answer = await job.answer
        finally:
            timer.cancel()
            self._num_bytes -= len(data)
        if answer.text is None:
            raise RequestError(answer.code, answer.message, answer.param)
        return [answer.text]

    async def aclose(self) -> None:
        self._is_closed = True
        if self._starting is not None:
            self._starting.cancel()
        link = self._link
        self._drop_link()
        self._fail_all(BackendError("the engine is stopping"))
        # It was killed; a thread to wait with could not start when the interpreter exits.
        for _ in range(_NUM_LOOKS):
            if link is None or not link.child.alive:
                break
            await asyncio.sleep(_LOOK_S)

    async def _start(self) -> None:
        self._link = await _TemplateLink.start(self)
        load = Load(
            templates=self._texts.templates,
            special_tokens=self._texts.special_tokens,
            deadline_s=2 * self._load_deadline_s,
            render_deadline_s=2 * self._render_deadline_s,
        )
        job = self._job(framed(_encoded(load)), _SPARE_BYTES, self._load_deadline_s)
        self._waiting.appendleft(job)
        self._send_next()
        try:
            answer = await job.answer
        except RequestError as error:
            raise ConfigError(f"{error} while it was compiled; {_WAY_OUT}") from None
        if answer.text is None:
            self._drop_link()
            raise ConfigError(answer.message + (f"; {_WAY_OUT}" if answer.code else ""))
        self._is_ready = True
        self._send()

    async def _start_again(self) -> None:
        try:
            await self._start()
        except PenstockError as error:
            self._fail_all(error)
        except OSError as error:
            self._fail_all(CapacityError(f"the chat template has no process: {error}"))
        finally:
            self._starting = None

    def _job(self, data: bytes, max_reply_bytes: int, deadline_s: float) -> _Job:
        answer = asyncio.get_running_loop().create_future()
        return _Job(data, answer, max_reply_bytes, deadline_s)

    def _send(self) -> None:
        if self._is_ready:
            while self._waiting and len(self._sent) < _NUM_AHEAD:
                self._send_next()
        elif self._starting is None and not self._is_closed:
            self._starting = asyncio.create_task(self._start_again())

    def _send_next(self) -> None:
        job = self._waiting.popleft()
        if job.answer.done():
            return  # nobody waits for it any more
        assert self._link is not None
        self._link.transport.write(job.data)
        self._sent.append(job)
        if self._timer is None:
            self._watch(job)

    def _watch(self, job: _Job) -> None:
        """`job` is the one that is being rendered."""
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(job.deadline_s, self._on_deadline, loop)

    def _on_deadline(self, loop: asyncio.AbstractEventLoop) -> None:
        # Its answer may lie there unread, if this process was busy itself.
        self._timer = loop.call_later(_GRACE_S, self._on_late)

    def _on_late(self) -> None:
        self._end(f"took longer than {self._sent[0].deadline_s:g} s")

    def max_reply_bytes(self) -> int:
        return self._sent[0].max_reply_bytes if self._sent else -1

    def on_reply(self, reply: bytes) -> None:
        try:
            rendered = _decode(reply)
        except msgspec.MsgspecError:
            self._end(_BROKEN)
            return
        job = self._sent.popleft()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._sent:
            self._watch(self._sent[0])
        if not job.answer.done():
            job.answer.set_result(rendered)
        if self._is_ready:
            self._send()

    def on_lost(self, link: "_TemplateLink") -> None:
        if link is self._link:
            self._end(_BROKEN)

    def _end(self, why: str) -> None:
        """End the process and the request it was at; the others go to the next process."""
        _log.warning("the chat template %s; its process is ended", why)
        was_ready = self._is_ready
        self._drop_link()
        if self._sent:
            job = self._sent.popleft()
            if not job.answer.done():
                said = f"the chat template {why}"
                if was_ready:
                    said += " with these messages; shorten them or use another template"
                job.answer.set_exception(RequestError("chat_template_failed", said, "messages"))
        while self._sent:
            self._waiting.appendleft(self._sent.pop())
        if was_ready and self._waiting:
            self._send()

    def _drop_link(self) -> None:
        link, self._link, self._is_ready = self._link, None, False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if link is not None:
            link.drop()

    def _fail_all(self, error: PenstockError) -> None:
        for job in (*self._sent, *self._waiting):
            if not job.answer.done():
                job.answer.set_exception(error)
        self._sent.clear()
        self._waiting.clear()


class _TemplateLink(asyncio.Protocol):
    """The process and the socket to it; cuts what comes into replies."""

    transport: asyncio.Transport

    def __init__(self, owner: TemplateProcess, child: Child) -> None:
        self.child = child
        self._owner = owner
        self._read = bytearray()
        self._is_dropped = False

    @classmethod
    async def start(cls, owner: TemplateProcess) -> "_TemplateLink":
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                child = await asyncio.to_thread(_spawn, theirs.fileno())
            link = cls(owner, child)
            ours.setblocking(False)
            await asyncio.get_running_loop().create_connection(lambda: link, sock=ours)
        except BaseException:
            ours.close()  # which ends the process, if there is one
            raise
        return link

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._read += data
        while len(self._read) >= HEAD.size and not self._is_dropped:
            [size] = HEAD.unpack_from(self._read)
            if size > self._owner.max_reply_bytes():
                self._owner.on_lost(self)
                return
            end = HEAD.size + size
            if len(self._read) < end:
                return
            reply = bytes(self._read[HEAD.size : end])
            del self._read[:end]
            self._owner.on_reply(reply)

    def connection_lost(self, error: Exception | None) -> None:
        if not self._is_dropped:
            self._owner.on_lost(self)

    def drop(self) -> None:
        self._is_dropped = True
        self.transport.abort()
        self.child.kill()


def _give_up(answer: "asyncio.Future[Rendered]") -> None:
    if not answer.done():
        said = f"chat requests before this one took {_MAX_WAIT_S:.0f} s; try again later"
        answer.set_exception(CapacityError(said))


def _spawn(channel: int) -> Child:
    return Child(
        "penstock.frontend.template_worker",
        {"channel": channel},
        "the chat template's process",
        lambda code: None,  # its socket tells
        [channel],
    )


def _encoded(value: Any) -> bytes:
    try:
        return _encode(value)
    except UnicodeEncodeError:
        raise RequestError(
            "invalid_value",
            "messages hold half of a surrogate pair, which is no character; send both halves",
            "messages",
        ) from None
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(
            "invalid_type", f"messages must be what JSON can say: {error}", "messages"
        ) from None
