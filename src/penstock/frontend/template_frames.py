"""What `rendering` and the process of a chat template (`template_worker`) say to each other: JSON,
each message after its length.
"""

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from penstock.types.request import ChatOptions

HEAD = struct.Struct("!I")


class Load(msgspec.Struct, frozen=True, tag=True):
    """First of all: compile these, if any. Taking longer than the deadlines ends the process."""

    templates: Mapping[str, str]
    special_tokens: Mapping[str, str]
    deadline_s: float
    render_deadline_s: float


class Render(msgspec.Struct, frozen=True, tag=True):
    messages: Sequence[Mapping[str, Any]]
    options: ChatOptions
    max_chars: int


class Rendered(msgspec.Struct, frozen=True):
    """The text, empty after `Load`, or why there is none."""

    text: str | None
    code: str = ""
    message: str = ""
    param: str | None = None


def framed(data: bytes) -> bytes:
    return HEAD.pack(len(data)) + data
