"""`--dp_size 2`: two engines behind one port; one dies under load, comes back, and nobody waits."""

import contextlib
import itertools
import json
import threading

import httpx
import psutil
import pytest
from server_process import Server
from waiting import until

LONG = {"model": "m", "prompt": "A story", "max_tokens": 7000, "ignore_eos": True, "stream": True}
TRIES = itertools.count()


@pytest.fixture(scope="module")
def server():
    settings = {"device": "cpu", "num_postprocess_workers": 2}
    with Server("tiny", "--dp_size", "2", **settings) as running:
        yield running


def engines(server):
    return server.children("penstock.engine_process")


class Reader(threading.Thread):
    """One stream, read to its end, or until it is told to leave."""

    def __init__(self, server, **changes):
        super().__init__(daemon=True)
        self.events = []
        self.error = None
        self.must_leave = False
        self._ask = f"{server.url}/v1/completions", LONG | changes
        self.start()

    def run(self):
        url, body = self._ask
        try:
            with httpx.stream("POST", url, json=body) as answer:
                for line in answer.iter_lines():
                    if self.must_leave:
                        return
                    if line.startswith("data: {"):
                        self.events.append(json.loads(line.removeprefix("data: ")))
        except httpx.HTTPError as error:
            self.error = error

    @property
    def has_failed(self):
        """Told so; what was refused before it began has no event at all."""
        return not self.is_alive() and (not self.events or "error" in self.events[-1])


def completion(server, text, **body):
    reply = server.post("/v1/completions", model="m", prompt=text, max_tokens=1, **body)
    return reply["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_both_serve_and_a_conversation_stays_where_its_prefix_is(server):
    until(lambda: len(engines(server)) == 2)
    assert server.version()["config"]["dp_size"] == 2
    first = 8 * next(TRIES)  # what another try has left in the cache is not found
    numbers = range(first, first + 8)
    texts = [f"{number}: " + f"water number {number} drives a wheel. " * 20 for number in numbers]
    assert [completion(server, text) for text in texts] == [0] * 8
    # Every later turn finds all of the earlier one that fills blocks, on whichever engine it was.
    assert all(completion(server, text + "And then?") >= 256 for text in texts)
    until(lambda: _serve_all(server))


def test_a_killed_engine_fails_its_own_requests_and_comes_back(server):
    until(lambda: server.counters()["engines"] == 2 == len(engines(server)))
    num_restarts = server.log.read_text().count("is started again")
    streams = [Reader(server, prompt=f"{number} A story") for number in range(8)]
    try:
        _kill_one(server, streams)
    finally:
        for stream in streams:
            stream.must_leave = True
    for stream in streams:
        stream.join(240)
    assert not any(stream.error for stream in streams)  # told, not cut off
    until(lambda: server.counters()["engines"] == 2 == len(engines(server)))
    until(lambda: _serve_all(server))
    assert server.log.read_text().count("is started again") == num_restarts + 1


def _kill_one(server, streams):
    until(lambda: all(stream.events for stream in streams))
    engines(server)[0].kill()
    until(lambda: any(stream.has_failed for stream in streams))
    assert server.http.get("/health").status_code == 200
    until(lambda: _answers(server))  # at once, but for an API server that has not heard of it yet
    seen = {stream: len(stream.events) for stream in streams if not stream.has_failed}
    until(lambda: all(one.has_failed or len(one.events) > n for one, n in seen.items()))
    assert 1 <= sum(not stream.has_failed for stream in streams) < len(streams)


def _answers(server):
    body = {"model": "m", "prompt": "x", "max_tokens": 4}
    return server.http.post("/v1/completions", json=body).status_code == 200


def _serve_all(server):
    """Whether every engine has worked when eight streams were open at once, and none failed."""
    before = {one: one.cpu_times().user for one in engines(server)}
    streams = [Reader(server, prompt=f"{number} again", max_tokens=200) for number in range(8)]
    for stream in streams:
        stream.join(240)
    if any(stream.error or stream.has_failed for stream in streams):
        return False
    return all(one.cpu_times().user > used for one, used in before.items())


def test_a_replica_that_dies_over_and_over_ends_the_server():
    with Server("tiny", "--dp_size", "2", device="cpu") as server:
        gone = set()

        def has_ended():
            with contextlib.suppress(psutil.NoSuchProcess):
                for one in engines(server)[:1]:
                    gone.add(one.pid)
                    one.kill()
            return server.process.poll() is not None

        until(has_ended)
        assert server.process.returncode == 1
        assert len(gone) >= 4
