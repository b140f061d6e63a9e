"""Several API server processes on one port: alike, one bound, and none takes the others with it.

The engine is `benchmarks/scripted_engine.py`. A connection goes to whichever process is free, so a
test that wants a certain one stops the others meanwhile.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from waiting import children, free_port, until

from penstock.config.schema import EngineConfig
from penstock.ipc.address import address
from penstock.ipc.process import Child
from penstock.server.api_servers import FAILED, MODULE, choose_num_api_servers
from penstock.server.shared_state import SharedState
from penstock.server.tenants import Access

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "http_streams.py"


class Server:
    def __init__(self, log: Path, num_files: int | None, rate: int, **settings: Any) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = log
        config = {
            "model": "tiny", "host": "127.0.0.1", "port": self.port,
            "model_kwargs": {"tokens_per_s": rate, "token_ids": [66, 67]},
        }  # fmt: skip

        limit = [] if num_files is None else ["prlimit", f"--nofile={num_files}:"]
        self.process = subprocess.Popen(
            [*limit, sys.executable, str(PROGRAM), "--serve", json.dumps(config | settings)],
            stderr=log.open("wb"),
            env=os.environ | {"PYTHONPATH": str(PROGRAM.parent)},
        )
        self.all = [psutil.Process(self.process.pid)]
        num_api_servers = int(settings.get("num_postprocess_workers", 1))
        until(lambda: self.answers() and len(self.api_servers()) == num_api_servers)
        for one in self.api_servers():
            with self.only(one):
                until(self.answers)

    @property
    def log(self) -> str:
        return self._log.read_text()

    def children(self, module: str) -> list[psutil.Process]:
        found = children(self.process.pid, module)
        self.all += [p for p in found if p not in self.all]
        return found

    def api_servers(self) -> list[psutil.Process]:
        return [self.all[0], *self.children("api_server_process")]

    def answers(self) -> bool:
        assert self.process.poll() is None, self.log
        try:
            return httpx.get(f"{self.url}/health").status_code == 200
        except httpx.TransportError:
            return False

    def refuses(self) -> bool:
        return httpx.get(f"{self.url}/health").status_code == 503

    @contextmanager
    def only(self, one: psutil.Process) -> Iterator[None]:
        others = [p for p in self.api_servers() if p != one]
        for other in others:
            other.suspend()
        try:
            yield
        finally:
            for other in others:
                other.resume()

    def stream(self, num_tokens: int, path: str = "/v1/completions") -> "Stream":
        return Stream(self.port, num_tokens, path)

    def metrics(self) -> dict[str, float]:
        text = httpx.get(f"{self.url}/prometheus/metrics").text
        families = text_string_to_metric_families(text)
        return {sample.name: sample.value for family in families for sample in family.samples}


class Stream:
    """One streamed answer, read when the test says so."""

    def __init__(self, port: int, num_tokens: int, path: str, buffer: int | None = None) -> None:
        body = {"max_tokens": num_tokens, "ignore_eos": True, "stream": True}
        if "chat" in path:
            body["messages"] = [{"role": "user", "content": "a"}]
        else:
            body["prompt"] = "a"
        data = json.dumps(body | {"stream_options": {"include_usage": True}}).encode()
        self.socket = socket.socket()
        if buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        self.socket.settimeout(240)
        self.socket.connect(("127.0.0.1", port))
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
        self.socket.sendall(head.encode() + data)
        self.head = b""
        while b"\r\n\r\n" not in self.head:
            self.head += self.socket.recv(1)

    @property
    def status(self) -> int:
        return int(self.head.split()[1])

    def events(self) -> list[dict[str, Any]]:
        """Everything up to [DONE], or the end of the connection."""
        received = bytearray()
        while b"data: [DONE]" not in received and (data := self.socket.recv(1 << 16)):
            received += data
        lines = received.split(b"\n\n")
        return [json.loads(one[one.index(b"{") :]) for one in lines if b"data: {" in one]


Start = Callable[..., Server]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    servers: list[Server] = []

    def start_one(rate: int = 200, num_files: int | None = None, **settings: Any) -> Server:
        log = tmp_path / f"log{len(servers)}"
        servers.append(Server(log, num_files, rate, **settings))
        return servers[-1]

    yield start_one
    for server in servers:
        for process in server.all:
            if process.is_running():
                process.kill()
        server.process.wait()


def test_every_front_end_serves_and_shows_the_sums_of_all(start):
    server = start(num_postprocess_workers=3)
    api_servers = server.api_servers()
    assert len(api_servers) == 3
    for one in api_servers:
        with server.only(one):
            events = server.stream(5).events()
            assert [len(event["choices"]) for event in events] == [1] * 5 + [0]
            assert events[-1]["usage"]["completion_tokens"] == 5
            assert httpx.get(f"{server.url}/health_generate").status_code == 200
            assert httpx.post(f"{server.url}/v1/completions", content=b"{").status_code == 400
    until(lambda: server.metrics()["penstock_iteration_tokens_count"] == 18)
    for one in api_servers:
        with server.only(one):
            until(lambda: server.metrics()["penstock_generated_tokens_total"] == 18)
            shown = server.metrics()
            assert shown["penstock_request_success_total"] == 3
            assert shown["penstock_requests_refused_total"] == 3
            assert shown["vllm:time_to_first_token_seconds_count"] == 3
            assert shown["vllm:inter_token_latency_seconds_count"] == 12
            # The first counts iterations, and does so only once.
            assert shown["penstock_iteration_tokens_count"] == 18
            choices = httpx.get(f"{server.url}/version").json()["choices"]
            assert {
                "setting": "num_postprocess_workers",
                "value": "3",
                "reason": "set by num_postprocess_workers",
            } in choices


def test_an_iteration_is_listed_once_whoever_is_asked(start):
    server = start(num_postprocess_workers=2)
    server.stream(8).events()
    first, second = server.api_servers()
    listed: list[int] = []

    def all_are_listed() -> bool:
        listed.extend(entry["iter"] for entry in httpx.get(f"{server.url}/metrics").json())
        return len(listed) >= 8

    with server.only(first):
        until(all_are_listed)
        assert listed == list(range(1, 9))
    with server.only(second):  # once it has been told, too
        until(lambda: server.metrics()["penstock_generated_tokens_total"] == 8)
        assert httpx.get(f"{server.url}/metrics").json() == []


def test_the_bound_on_open_requests_is_one_for_all(start):
    server = start(rate=20, num_postprocess_workers=2, max_queued_requests=3)
    first, second = server.api_servers()
    with server.only(first):
        kept = [server.stream(1000), server.stream(1000)]
    with server.only(second):
        kept.append(server.stream(1000))
        assert [one.status for one in kept] == [200] * 3
        assert server.stream(1000).status == 429
    kept[0].socket.close()
    until(lambda: server.metrics()["penstock_running"] == 2)
    with server.only(second):
        assert server.stream(1).status == 200


def test_a_killed_front_end_is_replaced_and_its_requests_end(start):
    server = start(rate=100, num_postprocess_workers=2, max_queued_requests=4)
    first, second = server.api_servers()
    with server.only(second):
        lost = [server.stream(10**6) for _ in range(2)]
        for stream in lost:
            stream.socket.recv(1, socket.MSG_PEEK)  # a token is there: the engine knows of it
    with server.only(first):
        kept = server.stream(150)
    second.kill()
    for stream in lost:  # cut off: neither a finish nor [DONE] comes
        assert all(event["choices"][0]["finish_reason"] is None for event in stream.events())
    until(lambda: server.metrics()["penstock_aborted_total"] == 2)
    until(lambda: len(server.api_servers()) == 2)
    replacement = server.api_servers()[1]
    with server.only(replacement):
        until(server.answers)
        # Room for all four of the bound: nothing of the dead one counts any more.
        again = [server.stream(3) for _ in range(3)]
        assert [one.events()[-1]["usage"]["completion_tokens"] for one in again] == [3] * 3
    assert kept.events()[-1]["usage"]["completion_tokens"] == 150
    assert "API server 1 is started again" in server.log


def test_a_response_stored_by_one_is_known_to_all(start):
    server = start(rate=200, num_postprocess_workers=2)
    first, second = server.api_servers()
    url = f"{server.url}/v1/responses"

    def ask(method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        return httpx.request(method, f"{url}{path}", json=body)

    def create(**body: Any) -> dict[str, Any]:
        asked = {"input": "a", "max_output_tokens": 3, "ignore_eos": True} | body
        return ask("POST", "", asked).json()

    def status(response: dict[str, Any]) -> str:
        return ask("GET", f"/{response['id']}").json()["status"]

    with server.only(first):
        stored = create()
        running = create(background=True, max_output_tokens=10**6)
        kept = create(background=True, max_output_tokens=10**6)
        until(lambda: server.metrics()["penstock_running"] == 2)
    with server.only(second):
        assert ask("GET", f"/{stored['id']}").json() == stored
        follow = create(previous_response_id=stored["id"])
        items = ask("GET", f"/{follow['id']}/input_items").json()["data"]
        assert [item["role"] for item in items] == ["user", "assistant", "user"]
        assert status(running) == "in_progress"
        assert ask("POST", f"/{running['id']}/cancel").json()["status"] == "cancelled"
        assert ask("DELETE", f"/{stored['id']}").json()["deleted"]
    with server.only(first):
        assert status(running) == "cancelled"
        assert ask("GET", f"/{stored['id']}").status_code == 404
        until(lambda: server.metrics()["penstock_running"] == 1)

    with server.only(second):
        in_second = create(background=True, max_output_tokens=10**6)
        until(lambda: server.metrics()["penstock_running"] == 2)
    second.kill()
    second.wait(240)
    until(lambda: status(in_second) == "failed")
    assert status(kept) == "in_progress"
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(240) == 0, "what runs in the background does not hold it up"
    assert "Traceback" not in server.log


def test_a_front_end_asked_to_leave_takes_neither_the_port_nor_the_key_with_it(start):
    server = start(num_postprocess_workers=2, api_key="secret")
    first, second = server.api_servers()
    with server.only(second):
        assert httpx.get(f"{server.url}/v1/models").status_code == 401
        good = {"authorization": "Bearer secret"}
        assert httpx.get(f"{server.url}/v1/models", headers=good).status_code == 200
    assert "secret" not in " ".join(second.cmdline())
    second.terminate()
    second.wait(240)
    assert server.answers()
    until(lambda: len(server.api_servers()) == 2)
    with server.only(server.api_servers()[1]):
        until(server.answers)
    assert first.is_running()


@pytest.mark.parametrize("whom", ["the first process", "all of them"])
def test_a_signal_lets_every_front_end_finish_and_leaves_no_process(start, whom):
    """Slurm and systemd signal all processes of a service."""
    server = start(rate=100, num_postprocess_workers=3)
    streams = []
    for one in server.api_servers():
        with server.only(one):
            streams.append(server.stream(40))
    others = server.all[0].children(recursive=True) if whom == "all of them" else []
    for process in (server.all[0], *others):
        process.send_signal(signal.SIGTERM)
    for stream in streams:
        assert stream.events()[-1]["usage"]["completion_tokens"] == 40
    assert server.process.wait(240) == 0
    assert not psutil.wait_procs(server.all[1:], timeout=240)[1]
    assert "Traceback" not in server.log


def test_one_that_cannot_start_says_why_in_the_log_of_the_first(tmp_path, caplog):
    model = tmp_path / "model"
    model.mkdir()
    (model / "tokenizer.json").write_text("{}")
    config = EngineConfig(model=str(model))
    shared = SharedState.create(str(tmp_path / "shared"), 2)
    codes, ended = [], threading.Event()
    caplog.set_level("INFO", "penstock")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        task = {
            "config": config.model_dump(mode="json"), "access": Access.load(config).to_task(),
            "tokenizer_folder": str(model), "engines": [address(str(tmp_path), "engine")],
            "shared_state": shared.path, "num_api_servers": 2, "reason": "",
            "listener": listener.fileno(), "index": 1, "client_id": 2,
        }  # fmt: skip
        child = Child(
            MODULE, task, "API server 1", lambda code: (codes.append(code), ended.set()),
            pass_fds=(listener.fileno(),),
        )  # fmt: skip
        try:
            assert ended.wait(240) and codes == [FAILED]
        finally:
            child.kill()
    [line] = [record.getMessage() for record in caplog.records if "API server 1" in record.message]
    assert line.startswith("API server 1 ended by itself with code 1: it cannot start: ")
    assert str(model) in line


def test_the_deadline_and_a_second_signal_reach_every_api_server(start):
    for timeout_s, num_signals in ((4.0, 1), (600.0, 2)):
        settings = {"http_config": {"shutdown_timeout": timeout_s}}
        server = start(rate=100, num_postprocess_workers=3, **settings)
        streams = []
        for one in server.api_servers():
            with server.only(one):
                streams.append(server.stream(10**6))
        server.process.send_signal(signal.SIGTERM)
        until(server.refuses)
        if num_signals == 2:
            server.process.send_signal(signal.SIGTERM)
        for stream in streams:
            last = stream.events()[-1]
            assert "shutting down" in last["error"]["message"], last
        assert server.process.wait(240) == 0
        assert not psutil.wait_procs(server.all[1:], timeout=240)[1]
        assert server.log.count("requests still run and are ended now") == 1
        assert "Traceback" not in server.log and "it is killed" not in server.log


def test_a_killed_engine_ends_the_requests_of_all_and_the_server(start):
    server = start(rate=100, num_postprocess_workers=2)
    streams = []
    for one in server.api_servers():
        with server.only(one):
            streams.append(server.stream(10**6))
    [engine] = server.children("scripted_engine")
    engine.kill()
    for stream in streams:
        last = stream.events()[-1]
        assert last["error"]["code"] == "engine_unavailable", last
    assert server.process.wait(240) == 1
    assert not psutil.wait_procs(server.all[1:], timeout=240)[1]


def test_a_killed_first_front_end_takes_everything_with_it(start):
    server = start(num_postprocess_workers=2)
    server.children("scripted_engine")
    server.all[0].kill()
    server.process.wait(240)
    assert not psutil.wait_procs(server.all[1:], timeout=240)[1]


def test_a_thousand_streams_at_once_where_a_shell_allows_256_files(start):
    server = start(rate=1000, num_files=256, num_postprocess_workers=2)
    streams = [server.stream(4, "/v1/chat/completions") for _ in range(1000)]
    for stream in streams:
        assert stream.status == 200
        assert stream.events()[-1]["usage"]["completion_tokens"] == 4
    until(lambda: server.metrics()["penstock_request_success_total"] == 1000)


def test_a_slow_reader_gets_everything_in_fewer_events(start):
    num_tokens = 100_000
    server = start(rate=0)
    slow = Stream(server.port, num_tokens, "/v1/completions", buffer=4096)
    until(lambda: server.metrics()["penstock_generated_tokens_total"] == num_tokens)
    events = slow.events()
    text = "".join(choice["text"] for event in events for choice in event["choices"])
    assert len(text) == num_tokens
    assert events[-1]["usage"]["completion_tokens"] == num_tokens
    assert len(events) < num_tokens * 0.8, "it was sent what it did not read"


@pytest.mark.parametrize(
    ("settings", "num_cpus", "has_gpu", "expected"),
    [
        ({}, 64, False, 1),
        ({"device": "cpu"}, 64, True, 1),
        ({"max_batch_size": 16}, 64, True, 1),
        ({}, 2, True, 1),
        ({}, 8, True, 2),
        ({}, 64, True, 4),
        ({"num_postprocess_workers": 6}, 2, False, 6),
        ({"num_postprocess_workers": 0}, 64, True, 1),
    ],
)
def test_the_number_of_api_servers(settings, num_cpus, has_gpu, expected):
    number, reason = choose_num_api_servers(EngineConfig(**settings), num_cpus, has_gpu)
    assert number == expected and reason
