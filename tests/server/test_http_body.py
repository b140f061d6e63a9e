"""Reading request bodies: many at once leave the event loop to others in between."""

import asyncio
import itertools
from types import SimpleNamespace

from starlette.requests import Request

from penstock.server import body


def a_request(app):
    async def receive():
        return {"type": "http.request", "body": b"[1, 2, 3]", "more_body": False}

    return Request({"type": "http", "method": "POST", "headers": [], "app": app}, receive)


def test_a_burst_begins_with_one_request_in_a_turn_of_the_loop(monkeypatch):
    seen = []
    decode = body.decode_json
    monkeypatch.setattr(body, "decode_json", lambda data: seen.append("begun") or decode(data))

    async def burst():
        app = SimpleNamespace(state=SimpleNamespace(server=SimpleNamespace(turn=asyncio.Lock())))
        loop = asyncio.get_running_loop()

        def turn():
            seen.append("turn")
            loop.call_soon(turn)

        turn()
        return await asyncio.gather(*(body.read_json(a_request(app)) for _ in range(20)))

    assert asyncio.run(burst()) == [[1, 2, 3]] * 20
    at = [place for place, what in enumerate(seen) if what == "begun"]
    assert len(at) == 20
    assert all(after - before > 1 for before, after in itertools.pairwise(at))
