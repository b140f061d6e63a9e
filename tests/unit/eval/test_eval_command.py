"""`penstock eval` as a user calls it, with a tiny random model in a real engine and server."""

import json
import logging
import sys

import pytest
from server_process import Server
from tiny_models import make_checkpoint

from penstock import LLM, SamplingParams
from penstock.cli.main import main, trtllm_eval

ENGINE = ("--set", "num_threads=1", "--set", "kv_cache_config.max_tokens=2048")
NUM_EACH = 3


def call(*argv: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["eval", *map(str, argv)])
    return ended.value.code


@pytest.fixture(autouse=True)
def _keep_log_handlers(monkeypatch):
    monkeypatch.setattr(logging.root, "handlers", list(logging.root.handlers))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random model with examples of two skills: it knows the one and not the other."""
    folder = make_checkpoint(tmp_path_factory.mktemp("sibling"), "llama")
    chats = [[{"role": "user", "content": f"Question {i}: go"}] for i in range(2 * NUM_EACH)]
    params = SamplingParams(temperature=0.0, max_tokens=24)
    with LLM(str(folder), num_threads=1, kv_cache_config={"max_tokens": 2048}) as llm:
        said = [output.outputs[0].text.strip() for output in llm.chat(chats, params)]
    assert len(set(said)) > 1  # else a mix-up of answers would not show
    lines = [
        {"skill": skill, "messages": chat, "expected": expected, "match": "exact"}
        for i, (chat, text) in enumerate(zip(chats, said, strict=True))
        for skill, expected in [("known", text) if i < NUM_EACH else ("unknown", text + "!")]
    ]
    (folder / "skills.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def test_a_model_is_scored_by_skill_through_its_own_engine(folder, tmp_path, capsys):
    output = tmp_path / "out.json"
    arguments = ("--task", "skills", "--max_tokens", 24, "--show", 1, "--output", output)
    assert call(folder, *arguments, *ENGINE) == 0
    printed = capsys.readouterr().out
    rows = [line.replace("│", " ").split() for line in printed.splitlines()]
    assert ["known", "3", "100.0%"] in rows
    assert ["unknown", "3", "0.0%"] in rows
    assert ["total", "6", "50.0%"] in rows
    assert printed.count("unknown (exact): 'Question 3: go'") == 1
    assert "Question 4" not in printed

    written = json.loads(output.read_text())
    assert written["total"] == {"num_examples": 6, "num_right": 3, "score": 0.5}
    assert written["groups"]["known"]["score"] == 1.0
    assert [one["is_right"] for one in written["examples"]] == [True] * 3 + [False] * 3
    last = written["examples"][-1]
    assert last["answer"]["content"] + "!" == last["expected"]
    assert last["messages"][0]["content"] == "Question 5: go"


def test_a_running_server_gets_the_same_score(folder, tmp_path):
    output = tmp_path / "out.json"
    arguments = ("--task", "skills", "--max_tokens", 24, "--output", output)
    with Server(folder, num_threads=1, kv_cache_config={"max_tokens": 2048}) as server:
        where = ("--url", server.url, "--data", folder / "skills.jsonl")
        assert call(*arguments, *where, "--min_score", 0.5) == 0
        assert call(folder, *arguments, "--url", server.url, "--min-score", 0.51) == 1
    written = json.loads(output.read_text())
    assert written["total"] == {"num_examples": 6, "num_right": 3, "score": 0.5}


def test_limit_takes_so_many_of_each_skill(folder, tmp_path, capsys):
    output = tmp_path / "out.json"
    arguments = ("--task", "skills", "--limit", 1, "--max_tokens", 24, "--output", output)
    assert call(folder, *arguments, *ENGINE) == 0
    groups = json.loads(output.read_text())["groups"]
    assert {name: group["num_examples"] for name, group in groups.items()} == {
        "known": 1,
        "unknown": 1,
    }


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["tiny"], "the following arguments are required: --task"),
        (["tiny", "--task", "skils"], "invalid choice: 'skils'"),
        (["--task", "skills"], "name a MODEL to start, or a running server with --url"),
        (["--task", "skills", "--url", "http://127.0.0.1:1"], "--data FILE is missing"),
        (["tiny", "--task", "skills", "--limit", "0"], "--limit"),
        (["tiny", "--task", "skills", "--data", "/no/where"], "cannot read the examples"),
        (["tiny", "--task", "skills", "--lmit", "3"], "did you mean '--limit'"),
    ],
)
def test_a_mistake_is_answered_at_once_with_the_way_out(argv, complaint, capsys):
    assert call(*argv) == 2
    assert complaint in capsys.readouterr().err


@pytest.fixture
def no_engine(monkeypatch):
    """A start of an engine fails the test: mistakes are found before."""

    def start(config):
        raise AssertionError("a model is loaded")

    monkeypatch.setattr("penstock.cli.eval.Engine", start)
    monkeypatch.setattr("penstock.cli.trtllm_eval.Engine", start)


@pytest.mark.parametrize("name", ["gsm8k", "mmlu", "hellaswag", "perplexity", "aime25", "gpqa"])
def test_missing_files_are_told_before_a_model_is_loaded(name, tmp_path, capsys, no_engine):
    where = tmp_path / "no" / "where"
    assert call("tiny", "--task", name, "--data", where) == 2
    assert f"{where}: no such file or folder" in capsys.readouterr().err
    assert call("tiny", "--task", name, "--data", tmp_path) == 2
    assert f"{tmp_path} has none of" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        trtllm_eval(["--model", "tiny", name, "--dataset_path", str(where)])
    assert f"{where}: no such file or folder" in capsys.readouterr().err


def test_a_folder_for_the_result_that_is_not_there_is_told_before(
    folder, tmp_path, capsys, no_engine
):
    output = tmp_path / "none" / "out.json"
    assert call(folder, "--task", "skills", "--output", output) == 2
    assert "its folder is not there" in capsys.readouterr().err


def test_a_model_without_examples_is_told_so(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    assert call(tmp_path, "--task", "skills") == 2
    assert f"'{tmp_path}' has no skills.jsonl beside it" in capsys.readouterr().err


def test_tasks_of_lm_eval_need_it_installed(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "penstock.eval.lm_eval_tasks", raising=False)
    assert call("tiny", "--task", "lm-eval:hellaswag") == 2
    assert "lm-eval:hellaswag needs lm-eval" in capsys.readouterr().err
