"""The benchmark's own parts: what its client sends and counts, how a server is run, the table."""

import json
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from waiting import until

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from cpu_servers import Client, Result, Server, _measure_speed, prompt, running, table

NUM_TOKENS = 5


class Handler(BaseHTTPRequestHandler):
    """Writes as many tokens as asked for, less `server.missing`."""

    def log_message(self, *args) -> None:
        pass

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        num = body["max_tokens"] - self.server.missing
        usage = {"completion_tokens": num}
        if body.get("stream"):
            chunks: list[dict] = [{"choices": [{"text": f"t{i} "}]} for i in range(num)]
            chunks.append({"choices": [], "usage": usage})
            events = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
            data = "".join([*events, "data: [DONE]\n\n"]).encode()
        else:
            data = json.dumps({"choices": [{"text": "all"}], "usage": usage}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def fake():
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.bodies, server.missing = [], 0
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def make_client(fake) -> Client:
    server = Server("fake", [], "m", {"ignore_eos": True, "stream_options": {}})
    return Client(server, fake.server_address[1], NUM_TOKENS)


def test_one_and_eight_requests_are_measured_with_prompts_that_share_no_beginning(fake):
    result = _measure_speed(make_client(fake), "fake", 1.5, rounds=2)
    assert (result.name, result.start_s, result.text) == ("fake", 1.5, "all")
    assert result.decode_tokens_per_s > 0
    assert result.c8_tokens_per_s > 0
    assert len(fake.bodies) == 1 + 2 * (1 + 8)
    assert len({body["prompt"].split()[0] for body in fake.bodies}) == len(fake.bodies)
    assert sum("stream" in body for body in fake.bodies) == 2
    for body in fake.bodies:
        assert (body["max_tokens"], body["temperature"]) == (NUM_TOKENS, 0.0)
        assert body["ignore_eos"] is True
        assert ("stream_options" in body) == ("stream" in body)


def test_an_answer_of_another_length_ends_the_benchmark(fake):
    fake.missing = 1
    client = make_client(fake)
    with pytest.raises(SystemExit, match="fake wrote 4 tokens, not 5"):
        client.complete(prompt(1))
    with pytest.raises(SystemExit, match="fake wrote 4 tokens, not 5"):
        client.decode_rate(prompt(2))


def test_a_server_that_ends_at_once_is_reported_with_its_log(tmp_path):
    log = tmp_path / "log"
    server = Server("broken", [sys.executable, "-c", "exit('no such model')"], "m", {})
    with (
        running(server, log) as process,
        pytest.raises(SystemExit, match=r"broken does not start(.|\n)*no such model"),
    ):
        Client(server, 1, NUM_TOKENS).wait(process, log)


def test_a_server_is_stopped_together_with_what_it_started(tmp_path):
    log = tmp_path / "log"
    child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    parent = (
        "import subprocess, sys, time; "
        f"print(subprocess.Popen([sys.executable, '-c', {child!r}]).pid, flush=True); "
        "time.sleep(600)"
    )
    with running(Server("parent", [sys.executable, "-c", parent], "m", {}), log) as process:
        while not (text := log.read_text()).endswith("\n"):
            assert process.poll() is None
    assert process.returncode is not None
    until(lambda: not _is_running(int(text)))  # the kernel ends a killed process when it can


def test_a_server_ends_with_a_benchmark_that_is_told_to_end(tmp_path):
    log = tmp_path / "log"
    sleeper = Server("sleeper", [sys.executable, "-c", "import time; time.sleep(600)"], "m", {})
    with pytest.raises(SystemExit), running(sleeper, log) as process:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(240)
    assert process.returncode is not None


def _is_running(pid: int) -> bool:
    try:
        # a killed orphan stays a zombie until somebody reaps it
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return os.path.exists(f"/proc/{pid}")


def test_the_table_compares_everything_with_penstock():
    results = [Result("penstock", 2.04, 30.0, 90.0, ""), Result("other", None, 10.0, 60.0, "")]
    first, second = table(results).splitlines()[2:]
    assert first == "| penstock | 2.0 | 30.0 |  | 90.0 |  |"
    assert second == "| other |  | 10.0 | 3.00x | 60.0 | 1.50x |"
    assert table(results[1:]).splitlines()[2] == "| other |  | 10.0 |  | 60.0 |  |"
