"""`penstock batch` against a server with a fake pipeline, and with an engine of its own (tiny)."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from http_fakes import OUTPUT, FakePipeline, running_server
from waiting import until

from penstock.cli.main import main


def request_line(custom_id: str, prompt: str = "Hi", **body: object) -> str:
    messages = [{"role": "user", "content": prompt}]
    body = {"model": "m", "messages": messages} | body
    url = "/v1/chat/completions"
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def batch(*args: object) -> int:
    with pytest.raises(SystemExit) as end:
        main(["batch", *map(str, args)])
    return end.value.code


def rows(path: Path) -> dict[str, dict]:
    return {(row := json.loads(line))["custom_id"]: row for line in path.read_text().splitlines()}


@pytest.fixture(autouse=True)
def _logs_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command sets up the logging of its process, which here is that of all tests."""
    monkeypatch.setattr("penstock.log.setup", lambda *args: None)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path, Path]:
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "out.errors.jsonl"


def test_results_and_errors_go_to_their_files(files, capsys):
    source, output, errors = files
    completion = {"prompt": "Hi", "max_tokens": 3}
    other = {"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": completion}
    bad = request_line("bad", temperature=-1)
    source.write_text(f"{request_line('a')}\n{bad}\n\n{json.dumps(other)}\n")
    with running_server(FakePipeline(), api_key="secret") as running:
        url = f"{running.url}/v1"  # as clients of OpenAI's API write it
        code = batch("-i", source, "-o", output, "--base_url", url, "--api_key", "secret")
    assert code == 1 and "2 of 3 results" in capsys.readouterr().err
    done = rows(output)
    assert set(done) == {"a", "c"}
    said = done["a"]["response"]
    assert said["status_code"] == 200 and said["request_id"] == said["body"]["id"]
    assert said["body"]["choices"][0]["message"]["content"] == OUTPUT
    assert done["c"]["response"]["body"]["choices"][0]["text"] == OUTPUT[:3]
    assert rows(errors)["bad"]["response"]["status_code"] == 400


def test_what_the_output_has_is_not_sent_again_and_what_failed_is(files):
    source, output, errors = files
    source.write_text("\n".join(request_line(f"r{i}") for i in range(5)))
    with running_server(FakePipeline()) as running:
        assert batch("-i", source, "-o", output, "--base_url", running.url) == 0
        assert not errors.exists() and len(running.pipeline.asked) == 5
        whole = output.read_bytes()
        # As a machine that lost its power would leave it: the last line is cut.
        output.write_bytes(b"".join(whole.splitlines(keepends=True)[:3]) + b'{"id": "batch_re')
        errors.write_text('{"custom_id": "r4"}\n')
        assert batch("-i", source, "-o", output, "--base_url", running.url) == 0
        assert len(running.pipeline.asked) == 7
        assert batch("-i", source, "-o", output, "--base_url", running.url) == 0
        assert len(running.pipeline.asked) == 7
    assert set(rows(output)) == {f"r{i}" for i in range(5)} and not errors.exists()


def test_no_more_than_concurrency_run_at_once(files):
    source, output, _ = files
    source.write_text("\n".join(request_line(f"r{i}", "HELD", max_tokens=6) for i in range(9)))
    with running_server(FakePipeline()) as running:
        pipeline = running.pipeline
        pipeline.is_held = lambda: pipeline.max_open < 3
        flags = ("--base_url", running.url, "--concurrency", 3)
        assert batch("-i", source, "-o", output, *flags) == 0
    assert pipeline.max_open == 3 and len(rows(output)) == 9


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no request"),
        ("{", "line 1: the body is not valid JSON"),
        (request_line("a") + "\n" + request_line("a"), "line 2: custom_id 'a'"),
        (request_line("a", stream=True), "stream must be left out"),
        (request_line("a").replace("chat/", "chat"), "url must be /v1/chat/completions or"),
        (request_line("a").replace("POST", "GET"), "method must be POST"),
        (request_line("a").replace("custom_id", "id"), "unknown field 'id'"),
    ],
)
def test_a_file_with_errors_is_told_before_anything_starts(files, capsys, text, said):
    source, output, _ = files
    source.write_text(text)
    assert batch("-i", source, "-o", output, "tiny") == 2
    assert said in capsys.readouterr().err and not output.exists()


@pytest.mark.parametrize("place", [1, 2])
def test_a_file_that_is_no_result_is_not_overwritten(files, capsys, place):
    source, output, _ = files
    source.write_text(request_line("a"))
    files[place].write_text("my notes\nof years\n")
    assert batch("-i", source, "-o", output, "--base_url", "http://127.0.0.1:1") == 2
    assert "no result of a batch" in capsys.readouterr().err
    assert files[place].read_text() == "my notes\nof years\n"


def test_a_wrong_key_ends_it_at_once(files, capsys):
    source, output, _ = files
    source.write_text("\n".join(request_line(f"r{i}") for i in range(50)))
    with running_server(FakePipeline(), api_key="secret") as running:
        flags = ("--base_url", running.url, "--api_key", "wrong")
        assert batch("-i", source, "-o", output, *flags) == 2
    assert "answers 401" in capsys.readouterr().err and rows(output) == {}


def test_an_engine_of_its_own_survives_an_interrupt_and_goes_on(files):
    """A real engine: Ctrl-C in the middle leaves whole lines, the next run does the rest."""
    source, output, errors = files
    asked = {"max_tokens": 40, "ignore_eos": True}
    lines = [request_line(f"r{i}", f"What is {i} + 30?", **asked) for i in range(30)]
    source.write_text("\n".join(lines))
    command = [sys.executable, "-m", "penstock", "batch", "tiny", "-i", source, "-o", output]
    command += ["--concurrency", "2", "--set", "max_batch_size=2"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # whoever runs us may ignore it
    process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, start_new_session=True)
    signal.signal(signal.SIGINT, before)
    until(lambda: output.exists() and output.stat().st_size)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    process.communicate(timeout=240)
    assert process.returncode == 130
    first = rows(output)
    assert 0 < len(first) < 30
    done = subprocess.run(command, env=env, stderr=subprocess.PIPE, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert f"{30 - len(first)} of 30 requests are left" in done.stderr.decode()
    after = rows(output)
    assert set(after) == {f"r{i}" for i in range(30)} and not errors.exists()
    assert all(after[one] == first[one] for one in first)
    assert len(output.read_text().splitlines()) == 30
