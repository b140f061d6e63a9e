"""`--dp_size 2`: two engines behind one port; one dies under load, comes back, and nobody waits."""

import json
import threading
import time

import httpx
import psutil
import pytest
from server_process import Server

LONG = {"model": "m", "prompt": "A story", "max_tokens": 3000, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def server():
    settings = {"device": "cpu", "max_seq_len": 4096, "num_postprocess_workers": 2}
    with Server("tiny", "--dp_size", "2", **settings) as running:
        yield running


def engines(server):
    children = psutil.Process(server.process.pid).children()
    return [one for one in children if "penstock.engine_process" in one.cmdline()]


def until(condition, limit_s=90.0):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit_s} s"
        time.sleep(0.05)


class Reader(threading.Thread):
    """One stream, read to its end, or until it is told to leave."""

    def __init__(self, server, **changes):
        super().__init__()
        self.events = []
        self.error = None
        self.must_leave = False
        self._ask = f"{server.url}/v1/completions", LONG | changes
        self.start()

    def run(self):
        url, body = self._ask
        try:
            with httpx.stream("POST", url, json=body, timeout=120) as answer:
                for line in answer.iter_lines():
                    if self.must_leave:
                        return
                    if line.startswith("data: {"):
                        self.events.append(json.loads(line.removeprefix("data: ")))
        except httpx.HTTPError as error:
            self.error = error

    @property
    def has_failed(self):
        return "error" in self.events[-1]


def completion(server, text, **body):
    reply = server.post("/v1/completions", model="m", prompt=text, max_tokens=1, **body)
    return reply["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_both_serve_and_a_conversation_stays_where_its_prefix_is(server):
    assert len(engines(server)) == 2
    assert server.version()["config"]["dp_size"] == 2
    texts = [f"{number}: " + f"water number {number} drives a wheel. " * 20 for number in range(8)]
    assert [completion(server, text) for text in texts] == [0] * 8
    # Every later turn finds all of the earlier one that fills blocks, on whichever engine it was.
    assert all(completion(server, text + "And then?") >= 256 for text in texts)
    busy = [one.cpu_times().user for one in engines(server)]
    assert min(busy) > 0


def test_a_killed_engine_fails_its_own_requests_and_comes_back(server):
    until(lambda: server.counters()["engines"] == 2 == len(engines(server)))
    num_restarts = server.log.read_text().count("is started again")
    streams = [Reader(server, prompt=f"{number} A story") for number in range(8)]
    until(lambda: all(stream.events for stream in streams))
    victim, other = engines(server)
    victim.kill()
    until(lambda: any(not stream.is_alive() for stream in streams))
    assert server.http.get("/health").status_code == 200
    until(lambda: _answers(server))  # at once, but for an API server that has not heard of it yet
    going = [stream for stream in streams if not stream.has_failed]
    assert 1 <= len(going) < len(streams)
    seen = [len(stream.events) for stream in going]
    until(lambda: all(len(one.events) > n for one, n in zip(going, seen, strict=True)))
    for stream in going:
        stream.must_leave = True
    for stream in streams:
        stream.join(120)
    assert not any(stream.error for stream in streams)  # told, not cut off
    until(lambda: len(engines(server)) == 2)
    until(lambda: server.counters()["engines"] == 2)
    [new] = [one for one in engines(server) if one.pid != other.pid]
    before = new.cpu_times().user
    until(lambda: _serves(server, new, before))
    assert server.log.read_text().count("is started again") == num_restarts + 1


def _answers(server):
    body = {"model": "m", "prompt": "x", "max_tokens": 4}
    return server.http.post("/v1/completions", json=body).status_code == 200


def _serves(server, engine, before):
    """Whether it has worked, when eight streams were open at once."""
    streams = [Reader(server, prompt=f"{number} again", max_tokens=40) for number in range(8)]
    for stream in streams:
        stream.join(120)
    assert not any(stream.error or stream.has_failed for stream in streams)
    return engine.cpu_times().user > before


def test_a_replica_that_dies_over_and_over_ends_the_server():
    with Server("tiny", "--dp_size", "2", device="cpu") as server:
        gone = set()
        deadline = time.monotonic() + 120
        while server.process.poll() is None:
            assert time.monotonic() < deadline
            try:
                first = engines(server)[0]
                if first.pid not in gone:
                    gone.add(first.pid)
                    first.kill()
            except (psutil.NoSuchProcess, IndexError):
                pass
            time.sleep(0.05)
        assert server.process.returncode == 1
        assert len(gone) >= 4
