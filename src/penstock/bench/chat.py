"""Conversations with a running server: each turn sends all that was said, answers included.

Decides when what is asked and keeps what came back; `conversations` says what is asked,
`chat_report` what it means. Needs httptools, msgspec and numpy, and no tokenizer, so that it runs
beside any server; uvloop and rich are used where they are.
"""

import asyncio
import itertools
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from penstock.bench.conversations import (
    ChatHistory,
    History,
    IdsHistory,
    TextHistory,
    Turn,
    Workload,
)
from penstock.bench.http import HttpClient, allow_connections
from penstock.bench.load import Arrivals, Ran, Tally, ask_counted, ask_one, run_jobs
from penstock.bench.openai import PATHS, Backend, served_model
from penstock.bench.progress import shown
from penstock.bench.records import Response
from penstock.errors import BackendError, ConfigError

_REFUSED = (400, 422)
_TEST_TURN = Turn(8, 4)
_TEST = Workload(system_tokens=0)  # shares no prefix with what is measured
_DEFAULT_CONVERSATIONS = 100
_AFTER_FAILURE_S = 1.0
# How a server is asked for the ids of an answer: vLLM's field, and ours.
_ID_FIELDS: tuple[dict[str, Any], ...] = ({"return_token_ids": True}, {"detokenize": False})


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """What is asked of which server, and when."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    backend: Backend = "openai-chat"
    model: str | None = None  # None: the first that the server lists
    workload: Workload = Workload()
    random_ids: bool = False
    arrivals: Arrivals = Arrivals()
    num_conversations: int | None = None
    seconds: float | None = None  # after these no conversation begins
    max_concurrency: int | None = None  # conversations
    think_s: float = 0.0
    temperature: float = 0.0
    ignore_eos: bool = True
    show_progress: bool = True


@dataclass(frozen=True, slots=True)
class Terms:
    """What the server turned out to take. `length_field` makes answers as long as asked for."""

    model: str
    length_field: str | None = None  # "ignore_eos" or "min_tokens"
    id_fields: Mapping[str, Any] = field(default_factory=dict)
    returns_ids: bool = False

    def fields(self, turn: Turn) -> dict[str, Any]:
        length: dict[str, Any] = {}
        if self.length_field == "ignore_eos":
            length = {"ignore_eos": True}
        elif self.length_field == "min_tokens":
            length = {"min_tokens": turn.num_answer}
        return {"model": self.model, **length, **self.id_fields}


@dataclass(frozen=True, slots=True)
class Talk:
    """One conversation: the turns that were meant, and responses up to the first that failed."""

    number: int
    turns: list[Turn]
    responses: list[Response]


@dataclass(frozen=True, slots=True)
class Talks:
    """A whole benchmark."""

    talks: list[Talk]
    terms: Terms
    ran: Ran
    tally: Tally


def run(options: ChatOptions, say: Callable[[str], None] = print) -> Talks:
    talking = talk_all(options, say)
    try:
        import uvloop
    except ImportError:
        return asyncio.run(talking)
    return uvloop.run(talking)


async def talk_all(options: ChatOptions, say: Callable[[str], None]) -> Talks:
    _check(options)
    client = HttpClient(options.url, dict(options.headers))
    try:
        terms = await _agree(client, options)
        say(summary(options, terms))
        session = _Session(client, options, terms)
        jobs, times_s = session.jobs()
        at_once = min(sum(one == 0 for one in times_s), options.max_concurrency or len(jobs))
        allow_connections(min(len(jobs), options.max_concurrency or len(jobs)))
        await client.open_ahead(at_once)
        async with shown(options.show_progress) as watch:
            watch(session.tally)
            done, ran = await run_jobs(jobs, times_s, options.max_concurrency)
    finally:
        client.close()
    return Talks([talk for several in done for talk in several], terms, ran, session.tally)


def summary(options: ChatOptions, terms: Terms) -> str:
    """What will be sent where, in a line."""
    low, high = options.workload.turns
    turns = f"{low}" if low == high else f"{low} to {high}"
    when = "all at once"
    if options.arrivals.rate != math.inf:
        when = f"{options.arrivals.rate:g} a second"
    limit = options.max_concurrency
    count = (
        f"{options.num_conversations or _DEFAULT_CONVERSATIONS} conversations"
        if options.seconds is None
        else f"conversations begun within {options.seconds:g} s"
    )
    return (
        f"{terms.model} at {options.url}{PATHS[options.backend]}: {count} of {turns} turns, {when}"
        f"{f', at most {limit} at a time' if limit else ''}, after "
        f"{options.workload.system_tokens} tokens that all share, seed {options.workload.seed}"
    )


class _Session:
    """The conversations while they run."""

    def __init__(self, client: HttpClient, options: ChatOptions, terms: Terms) -> None:
        self._client, self._options, self._terms = client, options, terms
        self.tally = Tally(None)

    def jobs(self) -> tuple[list[Callable[[], Awaitable[list[Talk]]]], list[float]]:
        """What runs side by side, and when each begins."""
        options = self._options
        if options.seconds is not None and math.isinf(options.arrivals.rate):
            assert options.max_concurrency is not None
            most = options.num_conversations
            numbers = itertools.count() if most is None else iter(range(most))
            num = options.max_concurrency
            return [lambda: self._talk_on(numbers)] * num, [0.0] * num
        times_s = arrival_times_s(options)
        planned = [options.workload.conversation(number) for number in range(len(times_s))]
        self.tally.num_requests = sum(map(len, planned))
        return [self._job(number, turns) for number, turns in enumerate(planned)], times_s

    def _job(self, number: int, turns: list[Turn]) -> Callable[[], Awaitable[list[Talk]]]:
        async def job() -> list[Talk]:
            return [await self._talk(number, turns)]

        return job

    async def _talk_on(self, numbers: Iterator[int]) -> list[Talk]:
        """One conversation after the other, until the time is over."""
        assert self._options.seconds is not None
        end = time.perf_counter() + self._options.seconds
        talks = []
        while time.perf_counter() < end and (number := next(numbers, None)) is not None:
            talk = await self._talk(number, self._options.workload.conversation(number))
            talks.append(talk)
            if talk.responses[-1].error is not None:
                # Else a server that refuses would be asked as fast as it can refuse.
                await asyncio.sleep(max(0.0, min(_AFTER_FAILURE_S, end - time.perf_counter())))
        return talks

    async def _talk(self, number: int, turns: list[Turn]) -> Talk:
        history = _history(self._options, self._options.workload, number)
        talk = Talk(number, turns, [])
        for place, turn in enumerate(turns):
            if place and self._options.think_s:
                await asyncio.sleep(self._options.think_s)
            request = _request(self._client, self._options, self._terms, history, turn)
            response = await ask_counted(self._client, request, self.tally)
            talk.responses.append(response)
            if response.error is not None:
                if self.tally.num_requests is not None:
                    self.tally.num_requests -= len(turns) - place - 1
                break
            history.add_answer(response)
        return talk


def arrival_times_s(options: ChatOptions) -> list[float]:
    """When conversations begin."""
    rate, seconds = options.arrivals.rate, options.seconds
    if seconds is None:
        return options.arrivals.times_s(options.num_conversations or _DEFAULT_CONVERSATIONS)
    expected = rate * seconds
    num = options.num_conversations or math.ceil(expected + 8 * math.sqrt(expected) + 8)
    return [one for one in options.arrivals.times_s(num) if one < seconds]


def _check(options: ChatOptions) -> None:
    if options.random_ids and options.backend == "openai-chat":
        raise ConfigError("a chat has no room for token ids; --random_ids needs --backend openai")
    endless = options.seconds is not None and math.isinf(options.arrivals.rate)
    if endless and options.max_concurrency is None:
        raise ConfigError(
            "--seconds without a rate begins a conversation where one ends: say how many run with "
            "--max_concurrency, or how many begin a second with --rate"
        )


async def _agree(client: HttpClient, options: ChatOptions) -> Terms:
    """Small requests, which are not measured, show what the server takes."""
    terms = Terms(options.model or await served_model(client))
    lengths = ("ignore_eos", "min_tokens", None) if options.ignore_eos else (None,)
    for name in lengths:
        terms = replace(terms, length_field=name)
        response = await _test(client, options, terms)
        if response.error is None:
            break
        if response.status not in _REFUSED or name == lengths[-1]:
            raise BackendError(f"the test request failed: {response.error}")
    if not options.random_ids:
        return terms
    if response.token_ids:
        return replace(terms, returns_ids=True)
    for fields in _ID_FIELDS:
        asking = replace(terms, id_fields=fields, returns_ids=True)
        if (await _test(client, options, asking)).token_ids:
            return asking
    return terms


async def _test(client: HttpClient, options: ChatOptions, terms: Terms) -> Response:
    workload = replace(_TEST, vocab_size=options.workload.vocab_size)
    history = _history(options, workload, "test")
    return await ask_one(client, _request(client, options, terms, history, _TEST_TURN))


def _request(
    client: HttpClient, options: ChatOptions, terms: Terms, history: History, turn: Turn
) -> bytes:
    body = {
        **terms.fields(turn),
        "temperature": options.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
        **history.ask(turn),
    }
    return client.post_request(PATHS[options.backend], msgspec.json.encode(body))


def _history(options: ChatOptions, workload: Workload, number: int | str) -> History:
    if options.backend == "openai-chat":
        return ChatHistory(workload, number)
    return (IdsHistory if options.random_ids else TextHistory)(workload, number)
