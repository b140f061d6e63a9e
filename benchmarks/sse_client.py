"""Reads many streamed answers at once, with the client of `penstock bench`.

What is wrong with a stream (refused, cut off, miscounted) is told in words.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import uvloop

from penstock.bench.http import HttpClient
from penstock.bench.load import Outcome as Load
from penstock.bench.load import send_all
from penstock.bench.records import Response


@dataclass(frozen=True, slots=True)
class Outcome:
    """One stream: seconds to its first event and from there to its last; `problem` if it failed."""

    first_s: float
    rest_s: float
    problem: str | None


def request_bytes(path: str, body: dict[str, Any], usage: bool = True) -> bytes:
    """A streamed request; with `usage` one more event at its end counts the tokens."""
    asked = body | {"stream": True, "stream_options": {"include_usage": usage}}
    data = json.dumps(asked).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def read_all(port: int, requests: Sequence[bytes], num_tokens: int) -> tuple[float, list[Outcome]]:
    """Send all at once; the seconds until the last has ended, and what became of each."""

    async def read() -> Load:
        client = HttpClient(f"http://127.0.0.1:{port}", {})
        try:
            return await send_all(client, requests, [0.0] * len(requests))
        finally:
            client.close()

    load = uvloop.run(read())
    outcomes = [
        Outcome(one.ttft_s, one.last_at - one.first_at, _problem(one, num_tokens))
        for one in load.responses
    ]
    return load.duration_s, outcomes


def _problem(response: Response, num_tokens: int) -> str | None:
    if response.error is not None:
        return response.error
    if response.num_output != num_tokens:
        return f"{response.num_output} tokens instead of {num_tokens}"
    if response.num_chunks < num_tokens:
        return f"{num_tokens} tokens came in {response.num_chunks} events"
    return None
