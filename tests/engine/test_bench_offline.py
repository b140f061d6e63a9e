"""trtllm-bench as people call it, through a real engine: files in, report and JSON out."""

import io
import itertools
import json
import re
import statistics

import pytest

from penstock import LLM, SamplingParams
from penstock.cli.main import main, trtllm_bench

ENGINE = ("--set", "num_threads=1", "--set", "kv_cache_config.max_tokens=4096")


def call(*argv: object, entry=trtllm_bench) -> int:
    with pytest.raises(SystemExit) as ended:
        entry([str(one) for one in argv])
    return ended.value.code


def rows(printed: str) -> dict[str, str]:
    return dict(re.findall(r"^(\S.*?): +(\S+)$", printed, re.MULTILINE))


def test_the_cheat_sheets_line_runs_synthetic_requests(capsys):
    line = ("--model", "tiny", "--dataset-type", "synthetic", "--num-requests", 10)
    assert call(*line, "--target-input-len", 9, "--target-output-len", 5, *ENGINE) == 0
    printed = capsys.readouterr().out
    seen = rows(printed)
    assert seen["Number of requests"] == "10"
    assert float(seen["Average Input Length (tokens)"]) == 9
    assert float(seen["Average Output Length (tokens)"]) == 5
    seconds = float(seen["Total Latency (ms)"]) / 1e3
    assert float(seen["Total Output Throughput (tokens/sec)"]) == pytest.approx(50 / seconds, 1e-3)
    assert float(seen["Total Token Throughput (tokens/sec)"]) == pytest.approx(140 / seconds, 1e-3)
    assert "TTFT" not in printed  # answers that come whole have no first token to time


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "set.json"
    command = ("--model", "tiny", "prepare-dataset", "--output", path, "token-unif-dist")
    lengths = ("--input-min", 3, "--input-max", 30, "--output-min", 2, "--output-max", 9)
    assert call(*command, "--num-requests", 12, *lengths) == 0
    return path


def test_a_prepared_file_runs_and_every_answer_is_written_down(dataset, tmp_path, capsys):
    lines = [json.loads(line) for line in dataset.read_text().splitlines()]
    assert len(lines) == 12
    assert {len(line["input_ids"]) for line in lines} <= set(range(3, 31))
    files = [tmp_path / name for name in ("report.json", "out.json", "requests.json", "log.jsonl")]
    names = ("--report_json", "--output_json", "--request_json", "--iteration_log")
    written = [part for pair in zip(names, files, strict=True) for part in pair]
    command = ("--model", "tiny", "throughput", "--dataset", dataset, "--concurrency", 3)
    assert call(*command, "--streaming", *written, *ENGINE) == 0
    seen = rows(capsys.readouterr().out)

    report, outputs, requests = (json.loads(path.read_text()) for path in files[:3])
    params = [
        SamplingParams(temperature=0, ignore_eos=True, max_tokens=line["output_tokens"])
        for line in lines
    ]
    with LLM("tiny", num_threads=1, kv_cache_config={"max_tokens": 4096}) as llm:
        expected = llm.generate([line["input_ids"] for line in lines], params, use_tqdm=False)
    said = [tuple(one["output_tokens"]) for one in outputs]
    assert said == [one.outputs[0].token_ids for one in expected]

    ttft_ms = [(one["first_token_s"] - one["start_s"]) * 1e3 for one in requests]
    overview = report["PERFORMANCE OVERVIEW"]
    average = overview["Average time-to-first-token [TTFT] (ms)"]
    assert average == pytest.approx(statistics.mean(ttft_ms))
    assert float(seen["[TTFT] P50"]) == pytest.approx(sorted(ttft_ms)[6], abs=1e-3)
    assert float(seen["[Output] MAXIMUM"]) == max(line["output_tokens"] for line in lines)
    most = max(
        sum(one["start_s"] <= other["start_s"] < one["end_s"] for one in requests)
        for other in requests
    )
    assert most == 3
    steps = [json.loads(line) for line in files[3].read_text().splitlines()]
    assert max(step["num_active"] for step in steps) <= 3


def test_latency_runs_one_request_after_the_other(dataset, tmp_path, capsys):
    times = tmp_path / "requests.json"
    command = ("bench", "latency", "--model", "tiny", "--dataset", dataset, "--num-requests", 4)
    assert call(*command, "--request-json", times, *ENGINE, entry=main) == 0
    assert rows(capsys.readouterr().out)["Concurrency"] == "1"
    requests = json.loads(times.read_text())
    assert len(requests) == 4
    for one, following in itertools.pairwise(requests):
        assert one["end_s"] <= following["start_s"]


def test_requests_come_from_stdin_where_no_file_is_named(monkeypatch, capsys):
    lines = '{"prompt": "What is 3 + 4?", "output_tokens": 3}\n{"prompt": "Hi", "output_tokens": 1}'
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    assert call("--model", "tiny", "throughput", "--warmup", 0, *ENGINE) == 0
    assert float(rows(capsys.readouterr().out)["Average Output Length (tokens)"]) == 2


def test_the_end_of_text_ends_an_answer_when_it_is_asked_for(tmp_path, capsys):
    path = tmp_path / "one.jsonl"
    path.write_text('{"prompt": "What is 3 + 4?", "output_tokens": 40}')
    output = tmp_path / "out.json"
    command = ("--model", "tiny", "throughput", "--dataset", path, "--output-json", output)
    assert call(*command, *ENGINE) == 0
    [whole] = json.loads(output.read_text())
    tokens = whole["output_tokens"]
    eos = next(one for one in tokens if one != tokens[0])
    assert call(*command, "--eos-id", eos, *ENGINE) == 0
    [cut] = json.loads(output.read_text())
    assert cut["output_tokens"] == tokens[: tokens.index(eos)]
    assert call(*command, "--eos-id", tokens[0], *ENGINE) == 0  # an answer without a token
    capsys.readouterr()


def test_real_questions_become_requests(tmp_path, capsys):
    source = tmp_path / "real.jsonl"
    rows = [{"question": "word " * n, "answer": "so it is"} for n in (2, 50, 3)]
    rows.insert(1, {"id": 7})  # asks nothing
    source.write_text("\n".join(map(json.dumps, rows)))
    command = ("bench", "prepare-dataset", "real-dataset", "--model", "tiny", "--stdout")
    limits = ("--dataset-path", source, "--max-input-len", 20)
    assert call(*command, *limits, entry=main) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 2
    assert lines[0]["output_tokens"] == lines[1]["output_tokens"] > 1
    assert call(*command, *limits, "--output-len-dist", "7,0", entry=main) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[0])["output_tokens"] == 7


def test_lengths_of_a_normal_distribution_have_its_mean(capsys):
    command = ("--model", "tiny", "prepare-dataset", "--stdout", "token-norm-dist")
    lengths = ("--input-mean", 100, "--input-stdev", 10, "--output-mean", 5, "--output-stdev", 0)
    assert call(*command, *lengths, "--num-requests", 400) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    inputs = [len(line["input_ids"]) for line in lines]
    assert statistics.mean(inputs) == pytest.approx(100, abs=2)
    assert statistics.stdev(inputs) == pytest.approx(10, abs=2)
    assert {line["output_tokens"] for line in lines} == {5}


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["throughput", "--warmup", "1"], "required: -m/--model"),
        (["--model", "tiny", "build"], "trtllm-bench build is not available"),
        (
            ["--model", "tiny", "--engine-dir", "x"],
            "no built engines",
        ),
        (["--model", "tiny", "--dataset", "/no/where"], "cannot read --dataset /no/where"),
        (["--model", "tiny", "--num-request", "3"], "did you mean '--num_requests'"),
        (["--model", "tiny", "prepare-dataset", "real-dataset"], "needs --dataset-path"),
        (["--model", "tiny", "prepare-dataset", "token-norm-dist", "--task-id", "3"], "LoRA"),
    ],
)
def test_a_mistake_is_answered_at_once(argv, complaint, capsys):
    assert call(*argv) == 2
    assert complaint in capsys.readouterr().err
