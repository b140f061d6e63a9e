"""Bytes on the wire: what a client may send, how much of it, and how slowly.

The process under test is this one, so its memory is measured here, too.
"""

import json
import select
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace

import httpx
import psutil
import pytest
from http_fakes import FakePipeline, running_server
from waiting import until

from penstock.server.http import MAX_HEAD_BYTES, MAX_PIPELINED

SLOW = b'{"prompt": "SLOW"}'
QUICK = b'{"prompt": "a", "max_tokens": 2}'
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
LIMITS = {
    "keep_alive_timeout": 0.6,
    "head_timeout": 0.4,
    "body_timeout": 0.4,
    "min_body_rate": 1000,
}
# For clients that must come in time.
LONGER_LIMITS = {"keep_alive_timeout": 3.0, "head_timeout": 2.0, "body_timeout": 2.0}


@pytest.fixture(scope="module")
def server() -> Iterator[SimpleNamespace]:
    with running_server(FakePipeline()) as running:
        yield running


@pytest.fixture(scope="module")
def hasty() -> Iterator[SimpleNamespace]:
    with running_server(FakePipeline(), http_config=LIMITS) as running:
        yield running


@pytest.fixture(scope="module")
def patient() -> Iterator[SimpleNamespace]:
    with running_server(FakePipeline(), http_config=LONGER_LIMITS) as running:
        yield running


def connect(server: SimpleNamespace, data: bytes = b"") -> socket.socket:
    client = socket.create_connection(("127.0.0.1", server.port), timeout=240)
    client.sendall(data)
    return client


def post(body: bytes, version: str = "1.1") -> bytes:
    start = f"POST /v1/completions HTTP/{version}\r\nHost: x\r\n"
    return f"{start}Content-Length: {len(body)}\r\n\r\n".encode() + body


def read_all(client: socket.socket) -> bytes:
    """Until the server closes."""
    received = b""
    try:
        while data := client.recv(1 << 16):
            received += data
    except ConnectionResetError:
        pass
    return received


def read_until(client: socket.socket, end: bytes) -> bytes:
    received = b""
    while end not in received:
        data = client.recv(1 << 16)
        assert data, received
        received += data
    return received


def num_sent(client: socket.socket, piece: bytes, most: int) -> int:
    """Bytes until the server does not take any more, `most` at the most."""
    count = 0
    try:
        while count < most:
            client.sendall(piece)
            count += len(piece)
    except (BrokenPipeError, ConnectionResetError):
        pass
    return count


@pytest.mark.parametrize(
    "piece",
    [b"T: x\r\n" * 1000, b"x" * 6000, b"\xff" * 6000],
    ids=["many trailers", "one endless trailer", "garbage"],
)
def test_endless_trailers_end_the_connection_and_take_no_memory(server, piece):
    before = psutil.Process().memory_info().rss
    client = connect(server, CHUNKED + b"2\r\n{}\r\n0\r\nA: ")
    most = 64 << 20
    assert num_sent(client, piece, most) < 16 << 20  # what lies in the sockets' buffers, at most
    assert psutil.Process().memory_info().rss - before < 16 << 20


def test_endless_trailers_need_no_key_to_be_cut_off():
    with running_server(FakePipeline(), api_key="secret") as server:
        client = connect(server, CHUNKED + b"2\r\n{}\r\n0\r\n")
        assert num_sent(client, b"T: x\r\n" * 1000, 64 << 20) < 16 << 20


def test_an_endless_chunk_extension_ends_the_connection(server):
    client = connect(server, CHUNKED + b"2;")
    assert num_sent(client, b"x" * 6000, 64 << 20) < 16 << 20


def test_blank_lines_before_a_request_are_bounded(server):
    assert num_sent(connect(server), b"\r\n" * 3000, 64 << 20) < 16 << 20


def test_a_large_head_in_one_piece_is_refused(server):
    client = connect(server, HEALTH[:-2] + b"X: " + b"a" * MAX_HEAD_BYTES + b"\r\n\r\n")
    assert read_all(client).startswith(b"HTTP/1.1 400 ")


def test_short_trailers_are_dropped_and_the_connection_goes_on(server):
    body = b"%x\r\n%b\r\n0\r\nauthorization: no\r\nhost: y\r\n\r\n" % (len(QUICK), QUICK)
    client = connect(server, (CHUNKED + body) * 2 + HEALTH[:-2] + b"connection: close\r\n\r\n")
    assert read_all(client).count(b"HTTP/1.1 200 OK") == 3


@pytest.mark.parametrize("body", [SLOW, b'{"prompt": "SLOW", "stream": true}'])
@pytest.mark.parametrize("waits", [False, True])
def test_a_client_that_leaves_with_requests_ahead_frees_the_one_that_runs(server, body, waits):
    num_aborted = len(server.pipeline.aborted)
    client = connect(server, post(body))
    if waits:
        until(lambda: server.pipeline.num_open == 1)
    client.sendall(HEALTH * 3)
    until(lambda: server.pipeline.num_open == 1)
    client.close()
    until(lambda: server.pipeline.num_open == 0)
    assert len(server.pipeline.aborted) == num_aborted + 1


def test_256_clients_that_leave_with_requests_ahead_leave_nothing_running(server):
    num_asked = len(server.pipeline.asked)
    for _ in range(256):
        connect(server, post(SLOW) + HEALTH).close()
    until(lambda: len(server.pipeline.asked) == num_asked + 256)
    until(lambda: server.pipeline.num_open == 0)


def test_a_client_that_leaves_is_noticed_while_its_next_body_is_not_read(server):
    """Nothing is read from a connection on which a large body waits for its turn."""
    client = connect(server, post(SLOW) + post(b" " * (4 << 20))[: 1 << 20])
    until(lambda: server.pipeline.num_open == 1)
    time.sleep(0.1)
    client.close()
    until(lambda: server.pipeline.num_open == 0)


def test_requests_ahead_are_answered_in_order_up_to_a_bound(server):
    asked = [post(b'{"prompt": "SLOW", "max_tokens": 3}'), *[HEALTH] * (MAX_PIPELINED - 2)]
    client = connect(server, b"".join(asked) + post(QUICK))
    client.sendall(HEALTH * 1000)
    received = read_all(client)  # it ends: the rest is not taken
    assert received.count(b"HTTP/1.1 200 OK") == MAX_PIPELINED
    parts = received.split(b"HTTP/1.1 200 OK")[1:]
    assert b'"text_completion"' in parts[0] and b'"text_completion"' in parts[-1]
    assert all(b'"status"' in part for part in parts[1:-1])
    assert b"connection: close" in parts[-1]


def test_garbage_behind_a_request_is_not_answered_within_its_answer(server):
    client = connect(server, post(b'{"prompt": "SLOW", "stream": true}'))
    assert client.recv(15) == b"HTTP/1.1 200 OK"
    client.sendall(b"\x00\x01 garbage\r\n\r\n")
    assert b"HTTP/1.1" not in read_all(client)
    until(lambda: server.pipeline.num_open == 0)


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", "2 Host headers"),
        (b"GET /health HTTP/1.1\r\nHost: a\r\nhost: a\r\n\r\n", "2 Host headers"),
        (b"GET /health HTTP/1.1\r\n\r\n", "0 Host headers"),
        (CHUNKED.replace(b"1.1", b"1.0") + b"2\r\n{}\r\n0\r\n\r\n", "HTTP/1.0"),
        (b"not HTTP at all\r\n\r\n", "not valid HTTP"),
    ],
    ids=["two hosts", "one host twice", "no host", "chunks in HTTP/1.0", "no HTTP"],
)
def test_what_another_server_may_read_differently_is_refused(server, request_, said):
    received = read_all(connect(server, request_))
    assert received.startswith(b"HTTP/1.1 400 ")
    error = json.loads(received.partition(b"\r\n\r\n")[2])["error"]
    assert said in error["message"] and error["code"] == "invalid_http"


def test_http_1_0_gets_no_chunks(server):
    answers = {}
    for stream in (b"false", b"true"):
        body = b'{"prompt": "a", "max_tokens": 4, "stream": %b}' % stream
        head, _, answers[stream] = read_all(connect(server, post(body, version="1.0"))).partition(
            b"\r\n\r\n"
        )
        assert b" 200 " in head and b"chunked" not in head and b"connection: close" in head
    assert json.loads(answers[b"false"])["usage"]["completion_tokens"] == 4
    events = answers[b"true"].split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    assert all(event.startswith(b"data: {") for event in events[:-2]) and len(events) > 4


def test_http_1_0_health_needs_no_host(server):
    assert b" 200 OK" in read_all(connect(server, b"GET /health HTTP/1.0\r\n\r\n"))


def test_a_head_that_does_not_end_gets_408(hasty):
    client = connect(hasty, b"GET /health HTTP/1.1\r\nHost")
    began = time.monotonic()
    while not select.select([client], [], [], 0.1)[0]:
        client.sendall(b"o")  # slowly, but it never stands still
    assert read_all(client).startswith(b"HTTP/1.1 408 ")
    assert time.monotonic() - began > 0.3


@pytest.mark.parametrize("sent", [b"", b"{"])
def test_a_body_that_stands_still_gets_408(hasty, sent):
    received = read_all(connect(hasty, post(b"{    }")[:-6] + sent))
    assert received.startswith(b"HTTP/1.1 408 ")
    error = json.loads(received.partition(b"\r\n\r\n")[2])["error"]
    assert error["code"] == "request_timeout" and "0.4 s" in error["message"]


def test_a_body_that_is_not_sent_after_its_answer_gets_no_second_one():
    with running_server(FakePipeline(), http_config=LIMITS, api_key="secret") as server:
        received = read_all(connect(server, post(SLOW)[:-1]))
        assert received.startswith(b"HTTP/1.1 401 ") and received.count(b"HTTP/1.1") == 1


def test_a_body_that_trickles_gets_408(hasty):
    client = connect(hasty, post(b" " * 1000)[:-1000])
    while not select.select([client], [], [], 0.1)[0]:
        client.sendall(b" ")
    received = read_all(client)
    assert received.startswith(b"HTTP/1.1 408 ") and b"min_body_rate" in received


def test_1500_half_sent_heads_and_bodies_are_gone_in_time(hasty):
    with ExitStack() as stack:
        clients = [
            stack.enter_context(connect(hasty, half))
            for half in (HEALTH[:-1], post(SLOW)[:-1], CHUNKED + b"5\r\n{") * 500
        ]
        assert all(read_all(client).startswith(b"HTTP/1.1 408 ") for client in clients)
    until(lambda: len(hasty.server.connections) == 0)
    assert hasty.pipeline.num_open == 0


def test_time_does_not_run_while_an_answer_is_under_way(patient):
    """Its request is older than every bound, and half of the next one has been sent."""
    body = b'{"prompt": "SLOW", "max_tokens": 64, "stream": true}'  # which takes 3.2 s
    client = connect(patient, post(body) + post(QUICK)[:-1])
    received = read_until(client, b"[DONE]")
    assert received.count(b"data: {") > 60
    client.sendall(post(QUICK)[-1:])
    read_until(client, b"HTTP/1.1 200 OK")


def test_an_idle_connection_is_closed_and_a_busy_one_is_kept(patient):
    idle, unused, busy = connect(patient, HEALTH), connect(patient), connect(patient)
    assert idle.recv(4096).startswith(b"HTTP/1.1 200 OK")
    for other in (idle, unused):
        while not select.select([other], [], [], 0.1)[0]:
            busy.sendall(HEALTH)
            assert busy.recv(4096).startswith(b"HTTP/1.1 200 OK")
    assert read_all(unused) == read_all(idle) == b""
    busy.sendall(HEALTH)
    assert busy.recv(4096).startswith(b"HTTP/1.1 200 OK")


def test_connections_of_one_address_are_bounded_where_that_is_wanted():
    with running_server(FakePipeline(), http_config={"max_connections_per_address": 3}) as server:
        kept = [connect(server, HEALTH) for _ in range(3)]
        assert all(one.recv(4096).startswith(b"HTTP/1.1 200 OK") for one in kept)
        refused = read_all(connect(server))
        assert refused.startswith(b"HTTP/1.1 429 ") and b"retry-after: 1" in refused
        kept[0].close()
        until(lambda: len(server.server.connections) == 2)
        assert connect(server, HEALTH).recv(4096).startswith(b"HTTP/1.1 200 OK")
    with running_server(FakePipeline()) as server, ExitStack() as stack:
        many = [stack.enter_context(connect(server)) for _ in range(50)]
        until(lambda: len(server.server.connections) == len(many))
        assert httpx.get(f"{server.url}/health").status_code == 200
