"""The benchmark's client: every legal way to cut a stream up, broken servers, limits, arrivals."""

import asyncio
import itertools
import json
import math
import re
import subprocess
import sys
import time

import numpy as np
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_http import ScriptedHttp, chunked, completion, http
from waiting import until

from penstock.bench.http import HttpClient, _Connection
from penstock.bench.load import Arrivals, ask_one, send_all
from penstock.bench.openai import AnswerReader, BodyOptions, body_of
from penstock.bench.records import Ask, Response
from penstock.errors import ConfigError


def ask(server: ScriptedHttp, is_stream: bool = True) -> Response:
    async def run() -> Response:
        client = HttpClient(server.url, {})
        try:
            return await ask_one(client, client.post_request("/v1/x", b"{}"), is_stream)
        finally:
            client.close()

    return asyncio.run(run())


def event(text: str) -> str:
    return "data: " + json.dumps({"choices": [{"text": text}]})


TEXTS = ("Hel", "lo ", "wörld\n\n", "data: [DONE]", "")
USAGE = 'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":5}}'


@pytest.mark.parametrize("end", ["\n\n", "\r\n\r\n"])
@given(cuts=st.lists(st.integers(0, 900), max_size=30))
def test_an_answer_is_the_same_wherever_the_bytes_are_cut(end, cuts):
    said = [event(text) + end for text in TEXTS]
    said.insert(2, f": a comment{end}")
    sent = b"".join(chunked(*said, USAGE + end, "data: [DONE]" + end))
    places = [0, *sorted({min(one, len(sent)) for one in cuts}), len(sent)]

    class Transport:
        def write(self, data: bytes) -> None:
            for begin, stop in itertools.pairwise(places):
                if begin < stop:
                    connection.data_received(sent[begin:stop])

    connection = _Connection()
    connection.connection_made(Transport())
    reader = AnswerReader(is_stream=True)
    asyncio.run(connection.exchange(b"", reader))
    reader.end()
    response = reader.response
    assert response.text == "".join(TEXTS)
    assert (response.num_chunks, response.num_output, response.num_prompt) == (len(TEXTS), 5, 7)
    assert response.started_at <= response.first_at <= response.last_at
    assert math.isclose(response.first_at + sum(response.gaps_s), response.last_at)
    assert connection.is_usable


def test_times_are_those_of_the_chunks():
    def are_right() -> bool:
        """But for a machine that does something else meanwhile."""
        response = ask(server)
        assert response.error is None and len(response.gaps_s) == 3
        assert response.ttft_s > 0.04  # the head comes a pause earlier, and is no token
        assert math.isclose(response.latency_s, response.ttft_s + sum(response.gaps_s))
        return response.ttft_s < 0.2 and all(0.04 < gap < 0.2 for gap in response.gaps_s)

    with ScriptedHttp(lambda path, body: completion(4), pause_s=0.05) as server:
        until(are_right)


def test_the_openai_package_measures_the_same():
    def agree() -> bool:
        begun, times = time.perf_counter(), []
        for chunk in client.completions.create(model="m", prompt="p", stream=True):
            if chunk.choices:
                times.append(time.perf_counter())
        response = ask(server)
        assert response.num_chunks == len(times) == 20 and response.ttft_s > 0.02
        taken_s = pytest.approx(times[-1] - times[0], rel=0.2)
        is_first = response.ttft_s < times[0] - begun + 0.05
        return is_first and response.last_at - response.first_at == taken_s

    with ScriptedHttp(lambda path, body: completion(20), pause_s=0.02) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        until(agree)


def test_a_chat_counts_what_is_said_thought_or_called_but_not_who_speaks():
    deltas = [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "hm "},
        {"content": "yes"},
        {"tool_calls": [{"index": 0}]},
    ]
    events = [f"data: {json.dumps({'choices': [{'delta': delta}]})}\n\n" for delta in deltas]
    events.append('data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n')
    with ScriptedHttp(lambda path, body: chunked(*events, "data: [DONE]\n\n")) as server:
        response = ask(server)
    assert (response.error, response.text, response.num_chunks) == (None, "hm yes", 4)
    assert response.num_output is None


def test_a_whole_answer_has_one_time():
    reply = {
        "choices": [{"message": {"content": "yes"}, "avg_decoded_tokens_per_iter": 1.5}],
        "usage": {"completion_tokens": 2, "prompt_tokens": 9},
    }
    body = json.dumps(reply, indent=2).encode()
    with ScriptedHttp(lambda path, asked: [http(body)]) as server:
        response = ask(server, is_stream=False)
    assert (response.text, response.num_output, response.tokens_per_step) == ("yes", 2, 1.5)
    assert response.ttft_s == response.latency_s > 0
    assert not response.gaps_s


def test_a_body_may_end_with_the_connection():
    reply = b'HTTP/1.0 200 OK\r\n\r\n{"choices":[{"text":"x"}]}'
    with ScriptedHttp(lambda path, body: [reply, None]) as server:
        response = ask(server, is_stream=False)
    assert (response.error, response.text) == (None, "x")


@pytest.mark.parametrize(
    ("pieces", "complaint"),
    [
        (
            [http(b'{"error":\n"too long"}', "400 Bad Request")],
            'status 400: {"error":\n"too long"}',
        ),
        (chunked(event("a") + "\n\n"), r"before its \[DONE\]"),
        (chunked(USAGE + "\n\n", "data: [DONE]\n\n"), "the stream was empty"),
        ([*completion(3)[:2], None], "closed before the answer's end"),
        (chunked('data: {"error": {"message": "out of memory"}}\n\n'), "out of memory"),
        (chunked("data: {nonsense\n\n"), r"not a response .*: +\{nonsense"),
        ([b"SSH-2.0-OpenSSH\r\n"], "HTTP"),
    ],
)
def test_what_goes_wrong_is_told(pieces, complaint):
    with ScriptedHttp(lambda path, body: pieces) as server:
        response = ask(server)
    assert response.error is not None
    assert re.search(complaint, response.error), response.error


def test_a_server_that_is_not_there_is_told():
    async def run() -> Response:
        client = HttpClient("127.0.0.1:1", {})
        return await ask_one(client, client.post_request("/", b"{}"))

    assert "cannot connect to 127.0.0.1:1" in (asyncio.run(run()).error or "")
    with pytest.raises(ConfigError, match="no address like"):
        HttpClient("ftp://x", {})


def test_a_name_is_looked_up_once_and_the_address_that_answers_is_kept(monkeypatch):
    looked_up = []

    async def run(server: ScriptedHttp) -> list[str | None]:
        loop = asyncio.get_running_loop()

        async def getaddrinfo(host, port, **more):
            looked_up.append(host)
            return [(2, 1, 6, "", (address, port)) for address in ("127.0.0.2", "127.0.0.1")]

        monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo)
        client = HttpClient(f"http://some.where:{server.port}", {})
        request = client.post_request("/", b"{}")
        first = await ask_one(client, request)
        rest = await asyncio.gather(*(ask_one(client, request) for _ in range(5)))
        client.close()
        return [first.error, *(one.error for one in rest)]

    with ScriptedHttp(lambda path, body: completion(1), pause_s=0.01) as server:
        assert asyncio.run(run(server)) == [None] * 6
    assert looked_up == ["some.where"]
    assert "Host: some.where" in server.heads[0]


def load(server: ScriptedHttp, num: int, limit: int | None, times_s: list[float] | None = None):
    async def run():
        client = HttpClient(server.url, {})
        requests = [client.post_request("/", b'{"i": %d}' % i) for i in range(num)]
        try:
            return await send_all(client, requests, times_s or [0.0] * num, limit)
        finally:
            client.close()

    return asyncio.run(run())


def test_no_more_requests_run_than_the_limit_and_connections_are_used_again():
    with ScriptedHttp(lambda path, body: completion(2), pause_s=0.005) as server:
        outcome = load(server, 20, limit=4)
    assert [one.error for one in outcome.responses] == [None] * 20
    assert server.most_open == 4
    assert server.num_connections == 4
    assert sorted(body["i"] for body in server.bodies) == list(range(20))
    tally = outcome.tally
    assert outcome.client_lag_s < 0.5
    assert (tally.num_ended, tally.num_failed, tally.num_running) == (20, 0, 0)
    assert tally.num_tokens == 40


def test_connections_are_open_and_answered_on_before_the_first_request():
    seen = []

    async def run(server: ScriptedHttp) -> None:
        client = HttpClient(server.url, {})
        await client.open_ahead(100)
        seen.append((server.num_connections, len(server.bodies)))
        requests = [client.post_request("/", b"{}")] * 100
        await asyncio.gather(*(ask_one(client, request) for request in requests))
        seen.append((server.num_connections, len(server.bodies)))
        client.close()

    with ScriptedHttp(lambda path, body: completion(1)) as server:
        asyncio.run(run(server))
    assert seen == [(100, 0), (100, 100)]


def test_a_kept_connection_that_the_server_has_closed_is_opened_again():
    served = []

    def script(path, body):
        served.append(body)
        return [*completion(1), None] if len(served) < 6 else completion(1)

    with ScriptedHttp(script) as server:
        outcome = load(server, 8, limit=1)
    assert [one.error for one in outcome.responses] == [None] * 8
    assert server.num_connections == 6


def test_requests_begin_at_their_times():
    with ScriptedHttp(lambda path, body: completion(1)) as server:
        outcome = load(server, 3, None, [0.0, 0.1, 0.3])
    begun = [one.started_at - outcome.begun_at for one in outcome.responses]
    assert np.allclose(begun, [0.0, 0.1, 0.3], atol=0.08)


@given(burstiness=st.floats(0.2, 10), rate=st.floats(0.1, 1000))
def test_gaps_between_arrivals_have_the_mean_and_the_spread_asked_for(burstiness, rate):
    times = Arrivals(rate, burstiness, seed=1).times_s(20_000)
    gaps = np.diff(times)
    assert times[0] == 0.0
    assert np.isclose(gaps.mean() * rate, 1.0, rtol=0.1)
    assert np.isclose(gaps.std() / gaps.mean(), burstiness**-0.5, rtol=0.1)


def test_as_many_files_may_be_open_as_requests_run():
    program = """
import resource
from penstock.bench.http import allow_connections
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 1000))
allow_connections(300)
assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 300
allow_connections(5000)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert "5000 requests at once need 5064 open files, this process may have 1000" in done.stderr


def test_an_infinite_rate_sends_all_at_once():
    assert Arrivals().times_s(3) == [0.0, 0.0, 0.0]


def test_bodies_hold_what_the_original_tool_sends():
    one = Ask(prompt=(5, 6), num_input=2, max_tokens=9)
    options = BodyOptions(
        backend="openai", model="m", ignore_eos=True, logprobs=2, sampling={"temperature": 0.5}
    )
    assert body_of(one, options) == {
        "model": "m",
        "prompt": (5, 6),
        "max_tokens": 9,
        "temperature": 0.5,
        "repetition_penalty": 1.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "logprobs": 2,
    }
    chat = BodyOptions(backend="openai-chat", model="m", stream=False, logprobs=2)
    picture = Ask(prompt="hi", num_input=1, max_tokens=9, image_urls=("data:x",), model="lora")
    assert body_of(picture, chat) == {
        "model": "lora",
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "hi"},
                    {"type": "image_url", "image_url": {"url": "data:x"}},
                ],
            }
        ],
        "max_completion_tokens": 9,
        "temperature": 0.0,
        "repetition_penalty": 1.0,
        "stream": False,
        "logprobs": True,
        "top_logprobs": 2,
    }
    with pytest.raises(ConfigError, match="no room for token ids"):
        body_of(one, chat)
