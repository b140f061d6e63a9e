"""What clients see when the server is told to leave, and how soon it does."""

import json
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from test_http_launch import READY, Server

Start = Callable[..., Server]


@pytest.fixture
def ready(tmp_path: Path) -> Iterator[Start]:
    servers: list[Server] = []

    def start(gate: Path | None = None, **http_config: float) -> Server:
        servers.append(Server("serves", tmp_path / "log", http_config, gate))
        if gate is not None:
            gate.touch()
        servers[0].wait_for_line(READY)
        return servers[0]

    yield start
    servers[0].process.kill()
    servers[0].process.wait()


class Asked:
    """A request on a connection of its own; it takes minutes where nobody ends it."""

    def __init__(
        self, server: Server, stream: bool, max_tokens: int = 4000, prompt: str = "SLOW"
    ) -> None:
        asked = {"prompt": prompt, "stream": stream, "max_tokens": max_tokens}
        body = json.dumps(asked).encode()
        self.socket = socket.create_connection(("127.0.0.1", server.port), timeout=240)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}"
        self.socket.sendall(head.encode() + b"\r\n\r\n" + body)
        if stream:
            self.socket.recv(1, socket.MSG_PEEK)

    def read(self) -> tuple[bytes, bytes]:
        """Head and body, to the end of the connection."""
        received = b""
        while data := self.socket.recv(1 << 16):
            received += data
        head, _, body = received.partition(b"\r\n\r\n")
        return head, body


def test_running_requests_finish_while_new_ones_are_sent_away(ready, tmp_path):
    gate = tmp_path / "gate"
    server = ready(gate, shutdown_timeout=600.0)
    gate.unlink()
    kept = httpx.Client(base_url=server.url)
    assert kept.get("/health").status_code == 200
    running = [Asked(server, stream, max_tokens=40, prompt="HELD") for stream in (True, False)]
    server.wait_for_requests(2)
    server.process.send_signal(signal.SIGTERM)
    server.wait_until_it_leaves()
    for client in (kept, httpx.Client(base_url=server.url)):  # an old connection and a new one
        answer = client.get("/health")
        assert answer.status_code == 503 and answer.headers["connection"] == "close"
        answer = client.post("/v1/completions", json={"prompt": "a" * 200_000})
        assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["code"] == "shutting_down"
        assert client.get("/prometheus/metrics").status_code == 200
    gate.touch()
    (_, events), (head, whole) = (one.read() for one in running)
    assert events.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") and b'"error"' not in events
    assert b" 200 OK" in head and b"connection: close" in head
    assert json.loads(whole)["usage"]["completion_tokens"] == 40
    assert server.process.wait(240) == 0
    assert "ended now" not in server.log and "Traceback" not in server.log


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_what_is_left_at_the_deadline_ends_with_an_error_and_one_line(ready, number):
    server = ready(shutdown_timeout=1.0)
    half = socket.create_connection(("127.0.0.1", server.port), timeout=240)
    half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
    streams = [Asked(server, stream=True) for _ in range(20)]
    wholes = [Asked(server, stream=False) for _ in range(20)]
    server.wait_for_requests(40)  # and the half one, which came before them
    began = time.monotonic()
    server.process.send_signal(number)
    for one in streams:
        head, body = one.read()
        assert b" 200 OK" in head and body.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        last = json.loads(body.split(b"data: ")[-2])
        assert "shutting down" in last["error"]["message"]
    for one in wholes:
        head, body = one.read()
        assert b" 503 " in head and b"application/json" in head
        assert "shutting down" in json.loads(body)["error"]["message"]
    assert half.recv(4096).startswith(b"HTTP/1.1 503 ")
    assert server.process.wait(240) == 0
    assert time.monotonic() - began > 0.9
    lines = server.log.partition(" -d '{")[2].splitlines()  # after the last line about the start
    assert len([line for line in lines if "41 requests still run" in line]) == 1
    assert "Traceback" not in server.log and "Exception in ASGI" not in server.log
    others = [line for line in lines if " client=127.0.0.1:" not in line]  # but the access log
    assert len(others) < 10, others


def test_a_second_signal_ends_it_at_once(ready):
    server = ready(shutdown_timeout=600.0)
    stream = Asked(server, stream=True)
    server.process.send_signal(signal.SIGTERM)
    server.wait_until_it_leaves()
    assert server.process.poll() is None
    server.process.send_signal(signal.SIGTERM)
    _, body = stream.read()
    assert body.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") and b"shutting down" in body
    assert server.process.wait(240) == 0  # of 600
    assert "(a second signal)" in server.log


def test_without_requests_it_leaves_at_once_whoever_is_connected(ready):
    server = ready(shutdown_timeout=600.0)
    idle = httpx.Client(base_url=server.url)
    assert idle.get("/health").status_code == 200
    halfway = socket.create_connection(("127.0.0.1", server.port))
    halfway.sendall(b"GET /health HTTP/1.1\r\nHo")
    assert server.stop() == 0  # which does not wait for 600


def test_a_client_that_reads_nothing_does_not_hold_the_server(ready):
    server = ready(shutdown_timeout=0.5)
    asked = Asked(server, stream=False, max_tokens=1)  # answered, and never read
    stuck = socket.create_connection(("127.0.0.1", server.port))
    stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    stuck.sendall(b"GET /prometheus/metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2000)
    server.wait_for_requests(1)
    assert server.stop() == 0
    asked.socket.close()
