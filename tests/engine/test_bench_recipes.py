"""The recipes' bench.sh, run as printed against a real server: shorter, here-docs repaired.

Two of the four write their script through a here-doc without quotes, in which the shell replaces
every variable by nothing; their authors meant what the other two do.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from server_process import Server

from penstock.cli.main import main

ROOT = Path(__file__).parents[2]
RECIPES = ROOT.parent / "shared" / "recipes"
BROKEN = ("llama-3.3-70b.md", "deepseek-r1.md")
NAMES = ("gpt-oss.md", "qwen3-next.md", *BROKEN)
SAVE = '--save-result --result-dir "${result_dir}" '
SAVE += '--result-filename "concurrency_${concurrency}.json"'
SHORTER = {
    r'concurrency_list="[\d ]+"': 'concurrency_list="1 3"',
    r"isl=1024": "isl=40",
    r"osl=1024": "osl=6",
    r"multi_round=5": "multi_round=2",
}

pytestmark = pytest.mark.skipif(not RECIPES.is_dir(), reason="the recipes are not at hand")


@pytest.fixture(scope="module")
def server():
    with Server("tiny", num_threads=1, kv_cache_config={"max_tokens": 8192}) as server:
        yield server


def block(name: str) -> str:
    """The commands that create bench.sh."""
    text = (RECIPES / name).read_text()
    [found] = re.findall(
        r"^```shell\n(cat <<.*?bench\.sh\n.*?)^```", text, re.MULTILINE | re.DOTALL
    )
    return found


@pytest.mark.parametrize("name", NAMES)
def test_bench_sh_runs_and_prints_the_sample_line_by_line(server, name, tmp_path):
    create = block(name)
    assert (name in BROKEN) == ("<<EOF" in create)
    subprocess.run(["bash", "-c", create.replace("<<EOF", "<<'EOF'")], cwd=tmp_path, check=True)
    script = tmp_path / "bench.sh"
    text = script.read_text()
    for long, short in SHORTER.items():
        text, num = re.subn(long, short, text)
        assert num == 1
    text = re.sub(r"result_dir=\S+", f"result_dir={tmp_path}/out", text)
    text = re.sub(r"--model \S+", f"--model tiny --port {server.port} {SAVE}", text)
    script.write_text(text)

    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT / "compat" / "src")}
    done = subprocess.run(
        ["bash", "./bench.sh"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr

    tables = re.findall(r"^=+ Serving.*?^={50}$", done.stdout, re.MULTILINE | re.DOTALL)
    assert len(tables) == 2
    expected = labels(sample())
    for printed, concurrency in zip(tables, (1, 3), strict=True):
        assert labels(printed) == expected
        rows = dict(re.findall(r"^(\S.*?): +(\S+) *$", printed, re.MULTILINE))
        record = json.loads((tmp_path / "out" / f"concurrency_{concurrency}.json").read_text())
        num = 2 * concurrency
        assert rows["Successful requests"] == str(num) == str(record["completed"])
        assert rows["Total input tokens"] == str(40 * num)
        assert rows["Total generated tokens"] == str(6 * num)
        assert float(rows["Mean TTFT (ms)"]) == pytest.approx(record["mean_ttft_ms"], abs=0.006)
        assert record["max_concurrency"] == concurrency
        about_answers = [one for one in record["extra"]["warnings"] if "this client" not in one]
        assert about_answers == []
        assert 0 < record["median_ttft_ms"] < record["median_e2el_ms"]
        total = record["output_throughput"] * record["duration"]
        assert total == pytest.approx(6 * num)
    for line in ("Starting initial single prompt test run", "Traffic request rate: inf"):
        assert done.stdout.count(line) == 2


def sample() -> str:
    text = (RECIPES / "gpt-oss.md").read_text()
    found = re.search(r"^=+ Serving.*?^={50}$", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[0]


def labels(printed: str) -> list[str]:
    return [line if line[0] in "=-" else line.partition(":")[0] for line in printed.splitlines()]


def test_a_chat_is_measured_and_a_failure_is_told(server, tmp_path, capsys):
    common = ["bench", "serve", "--model", "tiny", "--port", str(server.port), "--disable-tqdm"]
    random = ["--dataset-name", "random", "--random-input-len", "30", "--random-output-len", "5"]
    chat = [
        "--backend",
        "openai-chat",
        "--num-prompts",
        "4",
        "--goodput",
        "e2el:60000",
        "ttft:0.001",
    ]
    saved = ["--save-detailed", "--result-dir", str(tmp_path), "--metadata", "gpu=none", "tp=1"]
    assert call(*common, *random, *chat, *saved, "--ignore-eos") == 0
    [path] = tmp_path.glob("openai-chat-infqps-tiny-*.json")
    record = json.loads(path.read_text())
    assert record["output_lens"] == [5] * 4
    assert (record["request_goodput:"], record["gpu"], record["tp"]) == (0.0, "none", "1")
    assert (record["request_rate"], record["max_concurrency"]) == ("inf", None)
    assert any(record["generated_texts"])
    assert "Request goodput (req/s):" in capsys.readouterr().out

    whole = ["--num-prompts", "3", "--non-streaming", "--no-test-input", "--request-rate", "200"]
    assert call(*common, *random, *whole) == 0
    said = capsys.readouterr()
    assert "Mean E2EL (ms):" in said.out
    assert "TTFT" not in said.out
    assert "only e2el is shown" in said.err

    too_long = ["--dataset-name", "random", "--random-input-len", "100000", "--num-prompts", "2"]
    assert call(*common, *too_long) == 1
    assert "the test request failed: status 400" in capsys.readouterr().err
    assert call(*common, *too_long, "--no-test-input") == 1
    out = capsys.readouterr().out
    assert "Total failed requests: 2" in out
    assert "Successful requests:                     0" in out


def test_a_sweep_asks_something_new_at_every_level_and_draws_it(server, tmp_path, capsys):
    common = ["bench", "sweep", "--model", "tiny", "--port", str(server.port), "--disable-tqdm"]
    random = ["--dataset-name", "random-ids", "--tokenize-on-client", "--ignore-eos"]
    lengths = ["--random-input-len", "40", "--random-output-len", "4", "--rounds", "2"]
    lengths += ["--seed", "100"]  # the other tests ask what seed 0 makes
    levels = ["--concurrency", "1,3", "--result-dir", str(tmp_path / "out")]
    before = server.counters()
    assert call(*common, *random, *lengths, *levels) == 0
    records = [
        json.loads((tmp_path / "out" / f"concurrency_{level}.json").read_text()) for level in (1, 3)
    ]
    assert [(one["max_concurrency"], one["completed"]) for one in records] == [(1, 2), (3, 6)]
    # Of all prompts only the two test requests come twice.
    hits = server.counters()["prefix_hit_tokens"] - before["prefix_hit_tokens"]
    assert hits <= 2 * 40
    assert (tmp_path / "out" / "report.html").read_text().count('role="img"') == 8
    rates = ["--rates", "50,100", "--num-prompts", "4", "--result-dir", str(tmp_path / "rates")]
    assert call(*common, *random, *lengths, *rates) == 0
    record = json.loads((tmp_path / "rates" / "rate_100.json").read_text())
    assert (record["request_rate"], record["completed"]) == (100.0, 4)
    assert call(*common, *random) == 2
    assert "one of the arguments --concurrency --rates is required" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--model", "tiny", "--goodput", "itl:3"], "'itl:3' is not NAME:MILLISECONDS"),
        (["--model", "tiny", "--percentile-metrics", "ttft,x"], "there are ttft, tpot, itl, e2el"),
        (["--model", "tiny", "--num-promts", "3"], "did you mean '--num_prompts'"),
        (["--model", "tiny"], "sharegpt needs a file of conversations"),
        (["--model", "tiny", "--custom-tokenizer", "a.B"], "code is not loaded"),
        (["--model", "tiny", "--request-rate", "0"], "--request_rate"),
        (
            ["--model", "tiny", "--backend", "openai-chat", "--tokenize-on-client"],
            "leave out --tokenize-on-client",
        ),
    ],
)
def test_a_mistake_is_answered_at_once(argv, complaint, capsys):
    assert call("bench", "serve", *argv) == 2
    assert complaint in capsys.readouterr().err


def call(*argv: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(argv))
    return ended.value.code
