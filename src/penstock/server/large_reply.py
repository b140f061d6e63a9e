"""Replies with many log-probabilities, written while other requests go on.

A prompt of 8,000 tokens with 20 alternatives each takes half a second to write (2026-11-20).
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import msgspec

from penstock.types.outputs import TextDelta

T = TypeVar("T")
_MANY = 256  # log-probabilities with their alternatives: some 10 ms


async def encoded_reply(
    collected: Sequence[Sequence[TextDelta]], encode: Callable[[], bytes]
) -> bytes:
    """What `encode` makes of these samples; of a large reply in a thread."""
    num_entries = sum(map(_num_entries, collected))
    return await asyncio.to_thread(encode) if num_entries > _MANY else encode()


def is_large(delta: TextDelta) -> bool:
    """Of one event of a stream."""
    return len(delta.prompt_logprobs) + len(delta.logprobs) > _MANY


def _num_entries(samples: Sequence[TextDelta]) -> int:
    """Those of a prompt come with one of its samples, and are written for each."""
    num_of_prompt = sum(len(one.prompt_logprobs) for one in samples)
    return len(samples) * num_of_prompt + sum(len(one.logprobs) for one in samples)


def encoded(part: T) -> T:
    """Stands for a part of a reply: other threads run between the encoding of two, not within."""
    return cast("T", msgspec.Raw(msgspec.json.encode(part)))
