"""`penstock bench serve` as a user calls it, against a server that does what it is told."""

import json

import pytest
from scripted_http import ScriptedHttp, completion, http

from penstock.cli.main import benchmark_serving, main


@pytest.fixture
def server():
    def script(path, body):
        server.paths.append(path)
        if path == "/perf_metrics":
            return [http(b'[{"request_id": 1}]')]
        if path == "/v1/models":
            return [http(server.models)]
        if path in ("/start_profile", "/stop_profile"):
            return [http(b"{}")]
        if body.get("prompt") == server.refused:
            return [http(b"no", "503 Service Unavailable")]
        return completion(body["max_tokens"])

    with ScriptedHttp(script) as server:
        server.paths, server.refused = [], None
        server.models = b'{"object": "list", "data": [{"id": "tiny", "object": "model"}]}'
        yield server


def call(server: ScriptedHttp, *argv: object, entry=main) -> int:
    return call_without_model(server, "--model", "tiny", *argv, entry=entry)


def call_without_model(server: ScriptedHttp, *argv: object, entry=main) -> int:
    common = ["--base-url", server.url, "--random-output-len", "3"]
    common += ["--dataset-name", "random-ids", "--random-input-len", "5", "--num-prompts", "4"]
    command = ["bench", "serve"] if entry is main else []
    with pytest.raises(SystemExit) as ended:
        entry([*command, *common, *map(str, argv)])
    return ended.value.code


def test_the_key_is_sent_and_never_printed(server, capsys, monkeypatch):
    assert call(server, "--api-key", "secret-1") == 0
    monkeypatch.setenv("OPENAI_API_KEY", "secret-2")
    assert call(server) == 0
    keys = {head.partition("Authorization: Bearer ")[2].split("\r\n")[0] for head in server.heads}
    assert keys == {"secret-1", "secret-2"}
    said = capsys.readouterr()
    assert "secret" not in said.out + said.err


def test_without_a_name_the_model_that_is_served_is_taken(server, capsys):
    assert call_without_model(server, "--api-key", "secret") == 0
    assert capsys.readouterr().out.startswith(f"tiny at {server.url}")
    assert server.paths[0] == "/v1/models" and "Bearer secret" in server.heads[0]
    assert {body["model"] for body in server.bodies if body} == {"tiny"}
    server.models = b'{"data": []}'
    assert call_without_model(server) == 2
    assert "/v1/models names no model (status 200); set --model" in capsys.readouterr().err
    assert call_without_model(server, "--base-url", "http://127.0.0.1:9") == 1
    assert "127.0.0.1" in capsys.readouterr().err


def test_the_modules_entry_point_is_the_same_command(server, capsys):
    assert call(server, entry=benchmark_serving) == 0
    out = capsys.readouterr().out
    assert out.startswith("Namespace(backend='openai'")
    assert "Successful requests:                     4" in out
    assert len(server.bodies) == 5  # one ahead


def test_our_own_spelling_begins_with_a_line_for_people(server, capsys):
    assert call(server, "--max-concurrency", "2") == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first == (
        f"tiny at {server.url}/v1/completions: 4 prompts, at most 2 at once, dataset random-ids "
        "(5 tokens in, 3 out), seed 0"
    )
    assert call(server, "--request-rate", "50") == 0
    assert "4 prompts, all at once, 50 per second" in capsys.readouterr().out


def test_some_failures_are_told_before_the_table_and_left_out_of_it(server, tmp_path, capsys):
    assert call(server, "--tokenize-on-client", "--no-test-input") == 0
    server.refused = server.bodies[1]["prompt"]
    saved = ("--save-detailed", "--result-dir", tmp_path, "--result-filename", "x.json")
    assert call(server, "--tokenize-on-client", "--no-test-input", *saved) == 0
    out = capsys.readouterr().out
    assert out.index("Total failed requests: 1") < out.rindex("Serving Benchmark Result")
    assert "status 503: no" in out
    record = json.loads((tmp_path / "x.json").read_text())
    assert (record["completed"], record["extra"]["failed"]) == (3, 1)
    assert sorted(record["errors"]) == ["", "", "", "status 503: no"]
    assert sorted(record["output_lens"]) == [0, 3, 3, 3]


def test_adapters_are_drawn_and_sampling_is_sent(server):
    flags = ("--lora-modules", "one", "two", "--temperature", 0.5, "--top-k", 7, "--min-p", 0.1)
    assert call(server, *flags, "--num-prompts", 30, "--logprobs", 2, "--use-beam-search") == 0
    assert {body["model"] for body in server.bodies} == {"one", "two"}
    sent = server.bodies[0]
    assert (sent["temperature"], sent["top_k"], sent["min_p"]) == (0.5, 7, 0.1)
    assert (sent["logprobs"], sent["use_beam_search"], "top_p" in sent) == (2, True, False)


def test_a_profile_surrounds_the_run_and_the_servers_own_times_are_kept(server, tmp_path):
    flags = ("--profile", "--save-request-time-breakdown", "--result-dir", tmp_path)
    assert call(server, *flags, "--endpoint", "/v1/other") == 0
    runs = server.paths.index("/start_profile"), server.paths.index("/stop_profile")
    assert server.paths[runs[0] + 1 : runs[1]] == ["/v1/other"] * 4
    [kept] = tmp_path.glob("*-time_breakdown.json")
    assert json.loads(kept.read_text()) == [{"request_id": 1}]


def test_a_server_without_these_is_measured_all_the_same(capsys):
    def script(path, body):
        return completion(3) if path == "/v1/completions" else [http(b"", "404 Not Found")]

    with ScriptedHttp(script) as server:
        assert call(server, "--profile", "--save-request-time-breakdown") == 0
    said = capsys.readouterr().err
    assert "/start_profile answers 404: nothing is profiled" in said
    assert "the server has no /perf_metrics" in said


def test_how_it_goes_is_said_now_and_then(capsys, monkeypatch):
    monkeypatch.setattr("penstock.bench.progress._LINE_PERIOD_S", 0.05)
    with ScriptedHttp(lambda path, body: completion(3), pause_s=0.04) as server:
        assert call(server, "--max-concurrency", 2) == 0
        lines = capsys.readouterr().err.splitlines()
        assert any("/4 requests, " in line and "tok/s, 2 running" in line for line in lines)
        assert call(server, "--disable-tqdm") == 0
        assert "running" not in capsys.readouterr().err


def test_the_share_of_the_ceiling_is_shown_and_kept(server, tmp_path, capsys):
    saved = ("--save-result", "--result-dir", tmp_path, "--result-filename", "x.json")
    assert call(server, "--ceiling", "h200", "--max-concurrency", 2, *saved) == 0
    assert "ms per token that one H200 allows" in capsys.readouterr().out
    record = json.loads((tmp_path / "x.json").read_text())
    ceiling = record["extra"]["ceiling"]
    reached = record["output_throughput"] / ceiling["output_throughput"]
    assert ceiling["throughput_share"] == pytest.approx(reached)


def test_a_report_is_written(server, tmp_path, capsys):
    page = tmp_path / "deep" / "page.html"
    assert call(server, "--report", page) == 0
    assert page.read_text().count('role="img"') == 6
    assert f"written: {page}" in capsys.readouterr().out
