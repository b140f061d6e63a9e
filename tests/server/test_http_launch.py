"""`serve`: binds first, is ready when it says so, stops in order, fails loudly."""

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from http_fakes import INFO

from penstock.errors import ConfigError
from penstock.server.launch import bind
from penstock.server.report import startup_report

CHILD = Path(__file__).with_name("http_launch_child.py")
READY = "Application startup complete."


class Server:
    def __init__(self, mode: str, log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = log
        self.process = subprocess.Popen(
            [sys.executable, str(CHILD), mode, str(self.port)], stderr=log.open("wb")
        )

    @property
    def log(self) -> str:
        return self._log.read_text()

    def wait_for_line(self, line: str) -> None:
        deadline = time.monotonic() + 20
        while line not in self.log:
            assert self.process.poll() is None and time.monotonic() < deadline, self.log
            time.sleep(0.02)

    def answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health").status_code == 200
        except httpx.ConnectError:
            return False

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(20)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Server]]:
    servers: list[Server] = []

    def start_one(mode: str) -> Server:
        servers.append(Server(mode, tmp_path / f"log{len(servers)}"))
        return servers[-1]

    yield start_one
    for server in servers:
        server.process.kill()
        server.process.wait()


def test_ready_is_said_once_and_is_true(start):
    server = start("serves")
    server.wait_for_line("Waiting for application startup.")
    assert not server.answers()
    server.wait_for_line(READY)
    time.sleep(0.1)
    assert server.answers()
    assert server.stop() == 0
    assert server.log.count(READY) == 1
    assert "default on a CPU" in server.log and "curl http://127.0.0.1:" in server.log
    assert "Traceback" not in server.log


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_then_aborts_then_stops_the_engine(start, number):
    server = start("serves")
    server.wait_for_line(READY)
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json={"prompt": "SLOW", "stream": True}
    ) as response:
        next(response.iter_bytes())
        server.process.send_signal(number)
        assert server.process.wait(20) == 0
    assert "engine stopped, aborted ['SLOW']" in server.log


def test_the_process_fails_when_the_engine_dies(start):
    server = start("dies")
    server.wait_for_line(READY)
    assert server.process.wait(20) == 1
    assert "the engine has ended" in server.log


def test_a_signal_while_loading_ends_the_process(start):
    server = start("loads")
    server.wait_for_line("Waiting for application startup.")
    begun = time.monotonic()
    assert server.stop() == 1
    assert time.monotonic() - begun < 5
    assert READY not in server.log


def test_a_signal_before_the_server_hears_of_signals_ends_the_process(start):
    server = start("signalled")
    assert server.process.wait(20) == 1
    assert "stopped while the engine was starting" in server.log
    assert READY not in server.log and "Traceback" not in server.log


def test_a_model_that_is_not_there_is_one_line_before_anything_is_started(start):
    server = start("misses")
    assert server.process.wait(20) == 1
    assert "model '/no/such/folder': no such folder" in server.log
    assert "Waiting for application startup" not in server.log and "Traceback" not in server.log


def test_a_configuration_that_cannot_start_is_one_line(start):
    server = start("refuses")
    assert server.process.wait(20) == 1
    assert "the checkpoint has no config.json" in server.log
    assert "Traceback" not in server.log and READY not in server.log


def test_a_mistake_of_ours_while_starting_is_a_failure_too(start):
    server = start("breaks")
    assert server.process.wait(20) == 1
    assert "a mistake of ours" in server.log


def test_a_port_taken_while_loading_is_a_failure_too(start):
    server = start("serves")
    server.wait_for_line("Waiting for application startup.")
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", server.port))
        other.listen()
        assert server.process.wait(20) == 1
    assert "cannot listen on port" in server.log and "engine stopped" in server.log


def test_a_taken_port_is_said_before_anything_is_loaded(start):
    first = start("serves")
    first.wait_for_line(READY)
    second = subprocess.run(
        [sys.executable, str(CHILD), "serves", str(first.port)],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert second.returncode == 1
    assert f"port {first.port}" in second.stderr and "--port" in second.stderr
    assert "Waiting for application startup" not in second.stderr


def test_a_host_that_does_not_exist_is_a_configuration_error():
    with pytest.raises(ConfigError, match=r"203\.0\.113\.7"):
        bind("203.0.113.7", 0)


def test_the_report_names_times_settings_reasons_memory_and_a_command():
    report = startup_report(INFO, 2.5, "it's", "0.0.0.0", 8000, has_key=True)
    assert "load weights              1.50 s" in report
    assert "total, as waited for      2.50 s" in report
    assert "dtype           float32  default on a CPU" in report
    assert "max_batch_size  64" in report
    assert "weights      1.00 GiB" in report
    assert "curl http://localhost:8000/v1/completions" in report
    assert "Bearer $API_KEY" in report and "it'\\''s" in report
