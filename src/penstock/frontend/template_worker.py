"""`python -m penstock.frontend.template_worker`: compiles and renders chat templates, which are
programs of strangers. Started by `rendering`, by which it is killed when it takes too long.

Has little memory and no work but this. Leaves when its socket closes, which happens when its parent
dies. Should that be while it renders, its alarm ends it: an alarm also ends what holds Python up.
"""

import resource
import signal
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import BinaryIO

import msgspec

from penstock.errors import ConfigError, RequestError
from penstock.frontend.template_frames import HEAD, Load, Render, Rendered, framed
from penstock.ipc.process import read_task
from penstock.text.chat import ChatTemplate

MAX_MEMORY_BYTES = 1 << 30
_MAX_KEPT = 16
_decode = msgspec.json.Decoder(Load | Render).decode
_OUT_OF_MEMORY = f"the chat template takes more than {MAX_MEMORY_BYTES >> 20} MiB of memory"


def limit_memory() -> None:
    for kind, limit in (("RLIMIT_AS", MAX_MEMORY_BYTES), ("RLIMIT_CORE", 0)):
        try:
            resource.setrlimit(getattr(resource, kind), (limit, limit))
        except (AttributeError, ValueError, OSError):
            pass  # not every system has all of them; the deadline is left


def serve(channel: socket.socket) -> None:
    template: ChatTemplate | None = None
    of_request = _compiler({})
    deadline_s = 0.0  # of rendering
    incoming = channel.makefile("rb")  # requests that came together are read at once
    while (data := _receive(incoming)) is not None:
        try:
            asked = _decode(data)
            if isinstance(asked, Load):
                signal.setitimer(signal.ITIMER_REAL, asked.deadline_s)
                deadline_s = asked.render_deadline_s
                of_request = _compiler(asked.special_tokens)
                if asked.templates:  # else requests bring theirs
                    template = ChatTemplate(asked.templates, asked.special_tokens)
                reply = Rendered("")
            else:
                signal.setitimer(signal.ITIMER_REAL, deadline_s)
                own = asked.options.template
                used = template if own is None else of_request(own)
                assert used is not None, "templates come first"
                reply = Rendered(used.render(asked.messages, asked.options, asked.max_chars))
            answer = msgspec.json.encode(reply)
        except RequestError as error:
            answer = _refusal(error.code, error.message, error.param)
        except ConfigError as error:
            is_own = isinstance(asked, Render)
            of_field = ("invalid_value", "chat_template") if is_own else ("", None)
            answer = _refusal(of_field[0], str(error), of_field[1])
        except MemoryError:
            answer = _refusal("chat_template_failed", _OUT_OF_MEMORY, "messages")
        except Exception as error:  # a program of a stranger may raise anything
            answer = _refusal("invalid_value", f"the chat template fails: {error}", "messages")
        signal.setitimer(signal.ITIMER_REAL, 0)
        channel.sendall(framed(answer))


def _compiler(special_tokens: Mapping[str, str]) -> Callable[[str], ChatTemplate]:
    """Of templates that come with requests; the last ones are kept."""
    return lru_cache(_MAX_KEPT)(lambda text: ChatTemplate({"default": text}, special_tokens))


def _refusal(code: str, message: str, param: str | None) -> bytes:
    shown = message[:4096].encode("utf8", "replace").decode()
    return msgspec.json.encode(Rendered(None, code, shown, param))


def _receive(incoming: BinaryIO) -> bytes | None:
    head = incoming.read(HEAD.size)
    if len(head) < HEAD.size:
        return None
    [size] = HEAD.unpack(head)
    data = incoming.read(size)
    return data if len(data) == size else None


if __name__ == "__main__":
    task = read_task()
    limit_memory()
    # The parent may leave while it is answered.
    with socket.socket(fileno=task["channel"]) as channel, suppress(ConnectionError):
        serve(channel)
