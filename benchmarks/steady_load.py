"""A full server to which requests come evenly: the gaps between a stream's tokens, and the rate.

Each of `count` slots asks, reads its answer to the end and asks again. The slots begin one after
the other over the time that one answer takes, so from then on a prompt arrives as often as an
answer ends, and what is measured is the server among prompts and answers at once. An event is one
token.
"""

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import uvloop

from penstock.bench.http import HttpClient, HttpError
from penstock.bench.openai import AnswerReader
from penstock.bench.records import Response


@dataclass(slots=True)
class Seen:
    """What came between the two times of a measurement."""

    num_tokens: int = 0
    gaps_s: list[float] = field(default_factory=list)  # between chunks of one stream
    firsts_s: list[float] = field(default_factory=list)  # from asking to the first chunk
    problems: list[str] = field(default_factory=list)

    def add(self, response: Response, begin: float, end: float) -> None:
        """What of one answer falls between the two times."""
        if not response.first_at:
            return
        at = response.first_at
        if begin <= at < end:
            self.num_tokens += 1
            self.firsts_s.append(response.ttft_s)
        for gap in response.gaps_s:
            at += gap
            if begin <= at < end:
                self.num_tokens += 1
                self.gaps_s.append(gap)


def load(port: int, requests: Sequence[bytes], count: int, ramp_s: float, watch_s: float) -> Seen:
    """`count` slots share `requests`; measured for `watch_s` once all of them run."""
    return uvloop.run(_load(port, requests, count, ramp_s, watch_s))


async def _load(
    port: int, requests: Sequence[bytes], count: int, ramp_s: float, watch_s: float
) -> Seen:
    client, seen, responses = HttpClient(f"http://127.0.0.1:{port}", {}), Seen(), []

    async def slot(index: int) -> None:
        await asyncio.sleep(ramp_s * index / count)
        for request in itertools.cycle(requests[index::count]):
            reader = AnswerReader(is_stream=True)
            responses.append(reader.response)
            await client.exchange(request, reader)
            reader.end()

    begun = time.perf_counter()
    slots = [asyncio.create_task(slot(index)) for index in range(count)]
    # A slot never ends by itself, so one that is done has failed.
    ended, _ = await asyncio.wait(
        slots, timeout=ramp_s + watch_s, return_when=asyncio.FIRST_COMPLETED
    )
    for task in slots:
        task.cancel()
    await asyncio.gather(*slots, return_exceptions=True)
    client.close()
    for task in ended:
        if not isinstance(error := task.exception(), HttpError):
            raise AssertionError(f"a slot has ended: {error!r}")
        seen.problems.append(str(error))
    for response in responses:
        seen.add(response, begun + ramp_s, begun + ramp_s + watch_s)
    return seen
