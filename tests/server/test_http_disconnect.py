"""A client that leaves frees its request at once; a client that floods is cut off."""

import socket
from collections.abc import Iterator
from types import SimpleNamespace

import httpx
import pytest
from http_fakes import MAX_SEQ_LEN, FakePipeline, running_server
from waiting import until

from penstock.config.http import HttpConfig
from penstock.server.body_limits import Bodies
from penstock.server.http import MAX_HEAD_BYTES

MAX_BODY_BYTES = Bodies(HttpConfig(), MAX_SEQ_LEN).max_bytes


@pytest.fixture
def server() -> Iterator[SimpleNamespace]:
    with running_server(FakePipeline()) as running:
        yield running


def send(server: SimpleNamespace, body: bytes, path: str = "/v1/completions") -> socket.socket:
    client = socket.create_connection(("127.0.0.1", server.port), timeout=240)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    client.sendall(head.encode() + body)
    return client


BODIES = {
    "whole": b'{"prompt": "SLOW"}',
    "streaming": b'{"prompt": "SLOW", "stream": true}',
    "many prompts": b'{"prompt": ["SLOW", "SLOW"]}',
    "many prompts streaming": b'{"prompt": ["SLOW", "SLOW"], "stream": true}',
}


@pytest.mark.parametrize("kind", BODIES)
def test_a_client_that_leaves_frees_its_request(server, kind):
    client = send(server, BODIES[kind])
    until(lambda: server.pipeline.num_open > 0)
    if "streaming" in kind:
        assert client.recv(15) == b"HTTP/1.1 200 OK"
    client.close()
    until(lambda: server.pipeline.num_open == 0)
    assert set(server.pipeline.aborted) == {"SLOW"}


def test_a_chat_client_that_leaves_frees_its_request(server):
    body = b'{"messages": [{"role": "user", "content": "SLOW"}], "stream": true}'
    client = send(server, body, "/v1/chat/completions")
    until(lambda: server.pipeline.num_open > 0)
    client.close()
    until(lambda: server.pipeline.num_open == 0)
    assert len(server.pipeline.aborted) == 1


def test_a_finished_request_is_not_aborted(server):
    httpx.post(f"{server.url}/v1/completions", json={"prompt": "quick"})
    httpx.post(f"{server.url}/v1/completions", json={"prompt": "quick", "stream": True})
    assert server.pipeline.aborted == [] and server.pipeline.num_open == 0


def test_an_announced_body_over_the_limit_is_refused_unread(server):
    client = socket.create_connection(("127.0.0.1", server.port), timeout=240)
    length = MAX_BODY_BYTES + 1
    client.sendall(
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n".encode()
    )
    assert client.recv(4096).startswith(b"HTTP/1.1 413 ")


def test_an_endless_chunked_body_is_cut_off(server):
    client = socket.create_connection(("127.0.0.1", server.port), timeout=240)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    client.sendall(head)
    chunk = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
    try:
        for _ in range(2 * MAX_BODY_BYTES >> 20):
            client.sendall(chunk)
    except (BrokenPipeError, ConnectionResetError):
        pass
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_an_endless_header_is_cut_off(server):
    client = socket.create_connection(("127.0.0.1", server.port), timeout=240)
    client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: ")
    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        for _ in range(1000):
            client.sendall(b"a" * MAX_HEAD_BYTES)
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_many_connections_with_one_body_each_do_not_trip_the_head_limit(server):
    with httpx.Client(base_url=server.url) as client:
        for _ in range(5):
            body = {"prompt": [1] * 4000, "max_tokens": 1, "user": "u" * MAX_HEAD_BYTES}
            assert client.post("/v1/completions", json=body).status_code == 200
