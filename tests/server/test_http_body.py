"""Request bodies: whatever they hold, the event loop goes on, and together they are bounded."""

import asyncio
import contextlib
import gc
import gzip
import itertools
import json
import select
import socket
import time
from types import SimpleNamespace

import httpx
import pytest
from http_fakes import FakePipeline, running_server
from starlette.exceptions import HTTPException
from starlette.requests import Request
from waiting import until

from penstock.config.http import HttpConfig
from penstock.config.schema import EngineConfig
from penstock.errors import RequestError
from penstock.server import body
from penstock.server.app import build_app
from penstock.server.body_limits import SMALL_BYTES, Bodies, Turns
from penstock.text.json_outline import outline

# Of this process's own time, as others may have the processor meanwhile. What is too large took 4
# to 17 s before it was refused, and at most a tenth of this since.
MAX_STALL_S = 1.0
# So that values, not bytes, are what these bodies have too many of.
ROOMY = {"http_config": {"max_body_bytes": 64 << 20}}
COMPLETIONS = "/v1/completions"


def a_request(app):
    async def receive():
        return {"type": "http.request", "body": b"[1, 2, 3]", "more_body": False}

    return Request({"type": "http", "method": "POST", "headers": [], "app": app}, receive)


def test_a_burst_begins_with_one_request_in_a_turn_of_the_loop(monkeypatch):
    seen = []
    decode = body.decode_json
    monkeypatch.setattr(
        body, "decode_json", lambda data, most: seen.append("begun") or decode(data, most)
    )

    async def burst():
        bodies = Bodies(HttpConfig(), 1024)
        app = SimpleNamespace(state=SimpleNamespace(server=SimpleNamespace(bodies=bodies)))
        loop = asyncio.get_running_loop()

        def turn():
            seen.append("turn")
            loop.call_soon(turn)

        turn()
        return await asyncio.gather(
            *(body.read_body(a_request(app), lambda value: value) for _ in range(20))
        )

    assert asyncio.run(burst()) == [[1, 2, 3]] * 20
    at = [place for place, what in enumerate(seen) if what == "begun"]
    assert len(at) == 20
    assert all(after - before > 1 for before, after in itertools.pairwise(at))


def test_a_request_alone_in_its_turn_does_not_wait_for_the_next():
    async def take():
        turns = Turns()
        with pytest.raises(StopIteration):
            turns.take().send(None)
        second = turns.take()
        waiter = second.send(None)
        assert not waiter.done(), "one in a turn"
        for _ in range(4):
            await asyncio.sleep(0)
        assert waiter.done()
        second.close()
        with pytest.raises(StopIteration):
            turns.take().send(None)

    asyncio.run(take())


def test_whoever_leaves_before_its_turn_holds_up_nobody():
    async def take():
        turns = Turns()
        await turns.take()
        first, *leaving, last = [asyncio.create_task(turns.take()) for _ in range(5)]
        await first
        for one in leaving:
            one.cancel()
        await asyncio.wait_for(last, 240)
        assert all(one.cancelled() for one in leaving)

    asyncio.run(take())


def unknown_fields(count):
    return b"{" + b",".join(b'"%x":1' % i for i in range(count)) + b"}"


def logit_bias(count):
    entries = b",".join(b'"%d":1' % i for i in range(count))
    return b'{"prompt":"a","logit_bias":{' + entries + b"}}"


def metadata(count):
    return (
        b'{"prompt":"a","max_tokens":1,"metadata":{"a":[' + b",".join([b"[[],[]]"] * count) + b"]}}"
    )


def stops(count):
    return b'{"prompt":"a","stop":[' + b",".join([b"1"] * count) + b"]}"


def commas(count):
    return b'{"prompt":"a","max_tokens":1,"user":"' + b",[" * count + b'"}'


def tokens(count):
    return b'{"tokens":[' + b",".join([b"65"] * count) + b"]}"


def prompts(count, length):
    return json.dumps({"prompt": [[65] * length] * count, "max_tokens": 1}).encode()


# name: path, body, status
HEAVY = {
    "unknown fields": (COMPLETIONS, lambda: unknown_fields(2_500_000), 400),
    "nested metadata": (COMPLETIONS, lambda: metadata(2_600_000), 400),
    "ids to detokenize": ("/detokenize", lambda: tokens(16_000_000), 400),
    "logit_bias": (COMPLETIONS, lambda: logit_bias(2_600_000), 400),
    # As much as is read.
    "most unknown fields": (COMPLETIONS, lambda: unknown_fields(260_000), 400),
    "most metadata": (COMPLETIONS, lambda: metadata(21_800), 200),
    "most ids to detokenize": ("/detokenize", lambda: tokens(1_048_000), 400),
    "ids to detokenize that may come": ("/detokenize", lambda: tokens(65_536), 200),
    "most logit_bias": (COMPLETIONS, lambda: logit_bias(260_000), 400),
    "most wrong stops": (COMPLETIONS, lambda: stops(1_000_000), 400),
    "long prompt": (COMPLETIONS, lambda: prompts(1, 100_000), 400),
    "long prompts": (COMPLETIONS, lambda: prompts(255, 4000), 200),
    "text of commas": (COMPLETIONS, lambda: commas(10_000_000), 200),
}


async def stalled(app, path, data):
    """The answer's status, and for how much of its processor time the loop did nothing else."""
    status, at, worst, is_done = 0, 0, 0.0, False

    async def receive():
        nonlocal at
        if at >= len(data):
            await asyncio.Event().wait()
        await asyncio.sleep(0)
        at += 65536
        return {
            "type": "http.request",
            "body": data[at - 65536 : at],
            "more_body": at < len(data),
        }

    async def send(message):
        nonlocal status
        status = message.get("status", status)

    async def tick():
        nonlocal worst
        last = time.process_time()
        while not is_done:
            await asyncio.sleep(0.001)
            now = time.process_time()
            last, worst = now, max(worst, now - last)

    scope = {"type": "http", "method": "POST", "path": path, "headers": [], "extensions": {}}
    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0.01)
    await app({**scope, "query_string": b"", "root_path": ""}, receive, send)
    is_done = True
    await ticking
    return status, worst


@pytest.mark.parametrize("name", HEAVY)
def test_no_body_holds_up_the_event_loop(name):
    path, make, status = HEAVY[name]
    data = make()
    gc.collect()
    gc.freeze()  # as a server does
    app = build_app(FakePipeline(), EngineConfig(model="m", **ROOMY))
    found, worst = asyncio.run(stalled(app, path, data))
    gc.unfreeze()
    assert found == status
    assert worst < MAX_STALL_S


@pytest.mark.parametrize(
    ("text", "texts", "lists", "values", "depth"),
    [
        (b"1", 0, 0, 1, 0),
        (b"[]", 0, 1, 2, 1),
        (b"[1, 2, [3]]", 0, 2, 5, 2),
        (b'{"a": "b,[{", "c": 1}', 3, 1, 3, 1),
        (rb'["\"[,", "\\", "\\\"[["]', 3, 1, 4, 1),
        (b'{"a": {"b": [[]]}}', 2, 4, 5, 4),
    ],
)
def test_an_outline_counts_what_stands_outside_of_texts(text, texts, lists, values, depth):
    json.loads(text)
    found = outline(text, 100)
    assert (found.num_texts, found.num_lists) == (texts, lists)
    assert (found.num_values, found.depth) == (values, depth)


def test_an_outline_is_never_less_than_what_a_parser_builds():
    tokens = ["[", "]", "{", "}", ",", ":", '"', "\\", "1", "a"]
    for letters in itertools.product(tokens, repeat=5):
        text = "".join(letters)
        try:
            value = json.loads(text)
        except ValueError:
            continue
        assert outline(text.encode(), 100).num_values >= num_values(value), text


def num_values(value):
    children = value.values() if isinstance(value, dict) else value
    return 1 + (sum(map(num_values, children)) if isinstance(value, dict | list) else 0)


def test_the_default_limit_follows_from_max_seq_len():
    assert Bodies(HttpConfig(), 131_072).max_bytes == (8 << 20) + 64 * 131_072
    assert Bodies(HttpConfig(), 10_000_000).max_bytes == 256 << 20
    assert Bodies(HttpConfig(max_body_bytes=5000), 131_072).max_bytes == 5000
    with pytest.raises(ValueError, match="could never be read"):
        HttpConfig(max_body_bytes=1 << 30)


def test_stalled_bodies_are_bounded_together_and_small_ones_still_answered():
    """Each holds 1 MB and sends no more; there is room for 4."""
    settings = {"http_config": {"max_body_bytes_in_flight": 4 << 20, "max_body_bytes": 2 << 20}}
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1500000\r\n\r\n"
    with running_server(FakePipeline(), **settings) as server:
        stalled, answers = [], []
        for _ in range(8):
            client = socket.create_connection(("127.0.0.1", server.port), timeout=240)
            stalled.append(client)
            with contextlib.suppress(ConnectionError):
                client.sendall(head + b" " * 1_000_000)

        def num_refused():
            for client in select.select(stalled, [], [], 0)[0]:
                with contextlib.suppress(ConnectionError):
                    answers.append(client.recv(4096))
                stalled.remove(client)
                client.close()
            return sum(answer != b"" for answer in answers)

        until(lambda: num_refused() >= 3)
        assert all(
            answer.startswith(b"HTTP/1.1 429 ") and b"retry-after: 1" in answer.lower()
            for answer in answers
            if answer
        )
        ask = {"prompt": [65] * 1000, "max_tokens": 1}
        assert httpx.post(server.url + COMPLETIONS, json=ask).status_code == 200
        large = {"prompt": [65] * 1000, "max_tokens": 1, "user": "u" * 1_000_000}
        assert httpx.post(server.url + COMPLETIONS, json=large).status_code == 429
        for client in stalled:
            client.close()
        until(lambda: httpx.post(server.url + COMPLETIONS, json=large).status_code == 200)


def test_bodies_hold_all_they_may_and_not_a_byte_more():
    bodies = Bodies(HttpConfig(max_body_bytes_in_flight=1 << 20), 1024)
    bodies.hold(1 << 19)
    bodies.hold(1 << 19)
    with pytest.raises(HTTPException) as refused:
        bodies.hold(1)
    assert refused.value.status_code == 429 and bodies.num_held_bytes == 1 << 20
    bodies.give_back(1)
    bodies.hold(1)


def test_what_a_body_held_is_given_back_however_it_ends():
    bodies = Bodies(HttpConfig(max_body_bytes_in_flight=1 << 20), 1024)
    app = SimpleNamespace(state=SimpleNamespace(server=SimpleNamespace(bodies=bodies)))

    async def read(data, build):
        async def receive():
            return {"type": "http.request", "body": data, "more_body": False}

        scope = {"type": "http", "method": "POST", "headers": [], "app": app}
        held = []
        asked = body.read_body(
            Request(scope, receive),
            lambda value: held.append(bodies.num_held_bytes) or build(value),
        )
        try:
            return await asked, held
        except RequestError:
            return None, held

    large = b"[" + b" " * SMALL_BYTES + b"]"
    assert asyncio.run(read(large, list)) == ([], [2])
    assert bodies.num_held_bytes == 0
    assert asyncio.run(read(large + b"x", list)) == (None, [])
    assert bodies.num_held_bytes == 0


def test_a_compressed_body_is_refused_by_its_name_and_the_connection_goes_on():
    packed = gzip.compress(b'{"prompt": "Hi", "max_tokens": 2}' * 1000)
    with running_server(FakePipeline()) as server, httpx.Client(base_url=server.url) as client:
        for _ in range(2):
            for coding in ("gzip", "br, gzip"):
                headers = {"content-encoding": coding}
                reply = client.post(COMPLETIONS, content=packed, headers=headers)
                assert reply.status_code == 400
                assert f"Content-Encoding is '{coding}'" in reply.json()["error"]["message"]
            plain = {"prompt": "Hi", "max_tokens": 2}
            reply = client.post(COMPLETIONS, json=plain, headers={"content-encoding": "identity"})
            assert reply.status_code == 200
