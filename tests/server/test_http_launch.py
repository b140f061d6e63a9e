"""`serve`: binds first, is ready when it says so, stops in order, fails loudly."""

import errno
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from http_fakes import INFO, FakePipeline
from msgspec.structs import replace
from waiting import free_port, until

from penstock.errors import ConfigError
from penstock.server.launch import bind
from penstock.server.report import (
    base_url,
    chat_command,
    curl_command,
    full_report,
    ready_report,
)
from penstock.types.setting_choice import SettingChoice

CHILD = Path(__file__).with_name("http_launch_child.py")
READY = "Application startup complete."


class Server:
    def __init__(
        self, mode: str, log: Path, http_config: dict[str, float] | None, gate: Path | None = None
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log, self._asked = log, log.with_suffix(".asked")
        env = {"HTTP_CONFIG": json.dumps(http_config or {"shutdown_timeout": 1.0})}
        with log.open("wb") as said, self._asked.open("wb") as asked:
            self.process = subprocess.Popen(
                [sys.executable, str(CHILD), mode, str(self.port)],
                stdout=asked,
                stderr=said,
                env=os.environ | env | ({} if gate is None else {"GATE": str(gate)}),
            )

    @property
    def log(self) -> str:
        return self._log.read_text()

    def wait_for_line(self, line: str) -> None:
        until(lambda: line in self.log or self.process.poll() is not None, what=lambda: self.log)
        assert line in self.log, self.log

    def wait_for_requests(self, number: int) -> None:
        until(lambda: len(self._asked.read_text().splitlines()) >= number)

    def wait_until_it_leaves(self) -> None:
        """It has heard the signal, and requests keep it."""
        until(lambda: httpx.get(f"{self.url}/health").status_code == 503)

    def answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health").status_code == 200
        except httpx.ConnectError:
            return False

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(240)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start_one(mode: str, gate: Path | None = None) -> Server:
        servers.append(Server(mode, tmp_path / f"log{len(servers)}", None, gate))
        return servers[-1]

    yield start_one
    for server in servers:
        server.process.kill()
        server.process.wait()


def test_ready_is_said_once_and_is_true(start, tmp_path):
    server = start("serves", gate=tmp_path / "gate")
    server.wait_for_line("Waiting for application startup.")
    assert not server.answers() and READY not in server.log
    (tmp_path / "gate").touch()
    server.wait_for_line(READY)
    server.wait_for_line("curl")
    assert server.answers()
    assert server.stop() == 0
    assert server.log.count(READY) == 1
    *before, ready = server.log.split(f"is ready on {server.url}")
    assert READY in "".join(before), "the address comes last"
    assert f"chat --url {server.url}" in ready and f"curl {server.url}/v1/" in ready
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
        assert server.process.wait(240) == 0
    assert "engine stopped, aborted ['SLOW']" in server.log


def test_the_process_fails_when_the_engine_dies(start):
    server = start("dies")
    server.wait_for_line(READY)
    assert server.process.wait(240) == 1
    assert "the engine has ended" in server.log


def test_a_signal_while_loading_ends_the_process(start):
    server = start("loads")
    server.wait_for_line("Waiting for application startup.")
    assert server.stop() == 1
    assert READY not in server.log


def test_a_signal_before_the_server_hears_of_signals_ends_the_process(start):
    server = start("signalled")
    assert server.process.wait(240) == 1
    assert "stopped while the engine was starting" in server.log
    assert READY not in server.log and "Traceback" not in server.log


def test_a_model_that_is_not_there_is_one_line_before_anything_is_started(start):
    server = start("misses")
    assert server.process.wait(240) == 1
    assert "model '/no/such/folder': no such folder" in server.log
    assert "Waiting for application startup" not in server.log and "Traceback" not in server.log


def test_a_configuration_that_cannot_start_is_one_line(start):
    server = start("refuses")
    assert server.process.wait(240) == 1
    assert "the checkpoint has no config.json" in server.log
    assert "Traceback" not in server.log and READY not in server.log


def test_a_mistake_of_ours_while_starting_is_a_failure_too(start):
    server = start("breaks")
    assert server.process.wait(240) == 1
    assert "a mistake of ours" in server.log


def test_a_port_taken_while_loading_is_a_failure_too(start, tmp_path):
    server = start("serves", gate=tmp_path / "gate")
    server.wait_for_line("Waiting for application startup.")
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", server.port))
        other.listen()
        (tmp_path / "gate").touch()
        assert server.process.wait(240) == 1
    assert "cannot listen on port" in server.log and "engine stopped" in server.log


def test_a_taken_port_is_said_before_anything_is_loaded(start):
    first = start("serves")
    first.wait_for_line(READY)
    second = subprocess.run(
        [sys.executable, str(CHILD), "serves", str(first.port)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert second.returncode == 1
    assert f"port {first.port}" in second.stderr
    assert "a Penstock serves '/no/such/folder' there" in second.stderr
    assert (
        f'choose another with --port (make serve ARGS="--port {first.port + 1}")' in second.stderr
    )
    assert "Waiting for application startup" not in second.stderr


def test_a_port_that_somebody_else_has_is_told_soon_too(monkeypatch):
    monkeypatch.setattr("penstock.server.launch._ASK_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as other:  # accepts and says nothing
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match="in use; choose another with --port"):
            bind("127.0.0.1", port)


@pytest.mark.parametrize(
    ("host", "port", "said"),
    [
        ("192.0.2.1", 8000, "192.0.2.1 port 8000: .*; give an address of this machine with --host"),
        ("no-such-host.invalid", 8000, "invalid port 8000: .*; give an address of this machine"),
    ],
)
def test_an_address_that_is_not_ours_is_told_and_not_asked(monkeypatch, host, port, said):
    monkeypatch.setattr("penstock.server.launch._who_listens", lambda *_: pytest.fail("asked"))
    with pytest.raises(ConfigError, match=said):
        bind(host, port)


def test_a_port_that_needs_rights_is_told(monkeypatch):
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("socket.socket.bind", refuse)
    with pytest.raises(ConfigError, match="Permission denied; choose one above 1023 with --port"):
        bind("127.0.0.1", 80)


def test_a_mistyped_model_is_told_before_a_port_that_is_taken(start):
    first = start("serves")
    first.wait_for_line(READY)
    command = [sys.executable, str(CHILD), "misses", str(first.port)]
    second = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert second.returncode == 1
    assert "model '/no/such/folder': no such folder" in second.stderr


def test_a_host_that_does_not_exist_is_a_configuration_error():
    with pytest.raises(ConfigError, match=r"203\.0\.113\.7"):
        bind("203.0.113.7", 0)


def test_the_full_report_names_times_settings_reasons_and_memory():
    report = full_report(INFO, 2.5)
    assert "load weights              1.50 s" in report
    assert "total, as waited for      2.50 s" in report
    assert "dtype           float32  default on a CPU" in report
    assert "max_batch_size  64" in report
    assert "weights      1.00 GiB" in report


def test_the_ready_report_is_short_and_has_the_address_and_a_command():
    pipeline = FakePipeline()
    url = base_url("0.0.0.0", 8000)
    report = ready_report(pipeline, 2.5, "it's", url, has_key=True)
    assert "it's is ready on http://localhost:8000 after 2.5 s" in report
    assert len(report.strip().splitlines()) <= 12
    assert max(map(len, report.splitlines())) < 120
    words = shlex.split(report[report.index("curl ") :].replace("\\\n", ""))
    assert words[:2] == ["curl", "http://localhost:8000/v1/chat/completions"]
    assert "Authorization: Bearer $API_KEY" in words
    body = json.loads(words[-1])
    assert body["model"] == "it's" and body["messages"][0]["content"].endswith("France?")


def test_the_ready_report_says_what_is_less_than_was_asked_for():
    pipeline, why = FakePipeline(), "lowered from 4096 to what the cache holds"
    choices = (
        SettingChoice(name="max_seq_len", value="256", reason=why),
        SettingChoice(name="dtype", value="float32", reason="default on a CPU"),
    )
    pipeline.client.info = replace(INFO, choices=choices)
    report = ready_report(pipeline, 2.5, "m", "http://x", has_key=False)
    assert f"max_seq_len  256, {why}" in report and "default on a CPU" not in report


def test_the_way_to_chat_is_what_can_be_typed_in_this_shell(monkeypatch, tmp_path):
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "penstock").touch(mode=0o755)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.chdir(tmp_path)
    assert chat_command("http://localhost:8000") == ".venv/bin/penstock chat"
    assert chat_command("http://127.0.0.1:8000") == ".venv/bin/penstock chat"
    assert chat_command("http://x:1") == ".venv/bin/penstock chat --url http://x:1"
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert chat_command("http://localhost:8000") == f"{tmp_path}/.venv/bin/penstock chat"
    monkeypatch.setenv("PATH", f"/usr/bin:{tmp_path}/.venv/bin")
    assert chat_command("http://localhost:8000") == "penstock chat"


@pytest.mark.parametrize(
    ("has_tokenizer", "prompt"), [(True, "What is the capital of France?"), (False, [1, 2, 3])]
)
def test_the_command_fits_a_model_without_template_or_tokenizer(has_tokenizer, prompt):
    pipeline = FakePipeline()
    pipeline.renderer = None
    if not has_tokenizer:
        pipeline.tokenizer = None
    command = curl_command(pipeline, "m", base_url("::1", 80), has_key=False)
    words = shlex.split(command.replace("\\\n", ""))
    assert words[1] == "http://[::1]:80/v1/completions"
    assert json.loads(words[-1])["prompt"] == prompt and not any("Bearer" in one for one in words)


def test_a_server_says_little_unless_it_is_asked_to_say_more(start):
    server = start("serves")
    server.wait_for_line("curl")
    assert "is ready on http://127.0.0.1:" in server.log and "load weights" not in server.log
    assert len(server.log.splitlines()) <= 18, server.log
    assert server.stop() == 0
    talkative = start("serves-verbose")
    talkative.wait_for_line("curl")
    assert "default on a CPU" in talkative.log and "load weights" in talkative.log
