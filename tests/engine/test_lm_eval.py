"""lm-eval, where it is installed: the recipes' command against a server, and `penstock eval`.

Both beside lm-eval's own `hf` backend, with a trained sibling on problems that it has not seen. The
tasks are lm-eval's GSM8K with other data, and the choice how a question goes on.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from server_process import Server

from penstock.cli.main import main

lm_eval = pytest.importorskip("lm_eval")

ROOT = Path(__file__).parents[2]
TINY = ROOT / "src" / "penstock" / "hub" / "tiny"
ENGINE = {"num_threads": 1, "dtype": "float32", "kv_cache_config": {"max_tokens": 8192}}
NUM = 24
CHATML = "<|im_start|>user\\n{{question}}<|im_end|>\\n<|im_start|>assistant\\n"
GSM8K = """
include: {packaged}
task: {name}
dataset_path: json
dataset_name: null
dataset_kwargs: {{data_files: {{train: {data}, test: {data}}}}}
num_fewshot: 0
doc_to_text: "{text}"
"""
CHOICE = """
task: choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
output_type: multiple_choice
test_split: test
doc_to_text: beginning
doc_to_choice: endings
doc_to_target: 0
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""


@pytest.fixture(scope="module", autouse=True)
def _offline():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_DATASETS_OFFLINE", "1")
        yield


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> Path:
    """Task files; `sums` holds the sibling's template itself, `asked` leaves it to the model."""
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "problems.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "tools" / "siblings"))
        import corpus
    problems = [one for one in corpus.held_out_examples(8, NUM) if one.skill == "problem"]
    questions = [one.messages[-2]["content"] for one in problems]
    words = [question.split(" ") for question in questions]
    rows = [
        {
            "question": question,
            "answer": problem.messages[-1]["content"],
            "beginning": " ".join(words[i][:4]),
            "endings": [" ".join(words[k][4:9]) for k in (i, i - 1)],
        }
        for i, (question, problem) in enumerate(zip(questions, problems, strict=True))
    ]
    data.write_text("\n".join(map(json.dumps, rows)))
    packaged = Path(lm_eval.__file__).parent / "tasks" / "gsm8k" / "gsm8k.yaml"
    for name, text in (("sums", CHATML), ("asked", "{{question}}")):
        task = GSM8K.format(packaged=packaged, name=name, data=data, text=text)
        (folder / f"{name}.yaml").write_text(task)
    (folder / "choice.yaml").write_text(CHOICE.format(data=data))
    return folder


@pytest.fixture(scope="module")
def theirs(tasks):
    """Task -> examples, through transformers."""
    return lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(TINY), "dtype": "float32"},
        tasks=["sums", "choice"],
        batch_size=1,
        device="cpu",
        task_manager=lm_eval.tasks.TaskManager(include_path=str(tasks)),
    )["samples"]


def said(examples: list[dict]) -> dict[int, str]:
    return {one["doc_id"]: one["resps"][0][0] for one in examples}


def weighed(examples: list[dict]) -> dict[int, list[float]]:
    return {one["doc_id"]: [float(pair[0]) for [pair] in one["resps"]] for one in examples}


def right(examples: list[dict], metric: str) -> dict[tuple, float]:
    return {(one["doc_id"], one["filter"]): one[metric] for one in examples}


def same(ours: list[dict], examples: list[dict]) -> None:
    """Answers letter by letter, or weights, and every verdict."""
    if "acc" in examples[0]:
        assert {i: pytest.approx(v, abs=1e-3) for i, v in weighed(examples).items()} == weighed(
            ours
        )
        for metric in ("acc", "acc_norm"):
            assert right(ours, metric) == right(examples, metric)
    else:
        assert said(ours) == said(examples)
        assert right(ours, "exact_match") == right(examples, "exact_match")


def test_the_sibling_scores(theirs):
    """Else it would not show if answers were wrong in the same way."""
    assert len(theirs["sums"]) == 2 * NUM  # two filters
    assert sum(right(theirs["sums"], "exact_match").values()) >= 0.9 * 2 * NUM
    assert 0 < sum(right(theirs["choice"], "acc").values()) < NUM


def test_the_recipes_command_scores_a_server_as_transformers(tasks, theirs, tmp_path):
    with Server(TINY, **ENGINE) as server:
        command = (
            "--model local-completions --batch_size 256 --num_fewshot 0 --log_samples "
            f"--model_args model={TINY},base_url={server.url}/v1/completions,num_concurrent=32,"
            f"max_retries=20,tokenized_requests=False --include_path {tasks} "
        )
        written = "--tasks sums --gen_kwargs temperature=0.0,add_special_tokens=False"
        for task in (written, "--tasks choice"):
            argv = [*(command + task).split(), "--output_path", str(tmp_path)]
            env = os.environ | {"OMP_NUM_THREADS": "1"}
            ended = subprocess.run(
                [sys.executable, "-m", "lm_eval", *argv],
                check=False,
                env=env,
                capture_output=True,
                text=True,
            )
            assert ended.returncode == 0, ended.stderr[-2000:]
    for name in ("sums", "choice"):
        [path] = tmp_path.rglob(f"samples_{name}_*.jsonl")
        same([json.loads(line) for line in path.open()], theirs[name])


@pytest.mark.parametrize("way", ["engine", "server"])
def test_penstock_eval_runs_its_tasks(way, tasks, theirs, tmp_path, capsys):
    output = tmp_path / "out.json"
    argv = ["eval", "--task", "lm-eval:sums,choice", "--data", str(tasks), "--output", str(output)]
    if way == "engine":
        settings = ("num_threads=1", "dtype=float32", "kv_cache_config.max_tokens=8192")
        _call(*argv, str(TINY), *(word for one in settings for word in ("--set", one)))
    else:
        with Server(TINY, **ENGINE) as server:
            _call(*argv, "--url", server.url, "--tokenizer", str(TINY))
    examples = json.loads(output.read_text())["examples"]
    same([one for one in examples if "acc" in one], theirs["choice"])
    same([one for one in examples if "acc" not in one], theirs["sums"])
    printed = capsys.readouterr().out
    assert "|sums  |      3|flexible-extract|     0|exact_match|↑  |1.0000|±  |0.0000|" in printed
    assert "|choice|" in printed


def test_in_a_chat_the_model_applies_its_template(tasks, theirs, tmp_path):
    output = tmp_path / "out.json"
    argv = ["eval", "--task", "lm-eval:asked", "--data", str(tasks), "--output", str(output)]
    settings = ("num_threads=1", "dtype=float32", "kv_cache_config.max_tokens=8192")
    flags = [word for one in settings for word in ("--set", one)]
    _call(*argv, str(TINY), "--apply_chat_template", *flags)
    examples = json.loads(output.read_text())["examples"]
    assert said(examples) == {i: text.strip() for i, text in said(theirs["sums"]).items()}


def test_a_task_that_there_is_not_is_named(tasks, capsys):
    with Server(TINY, **ENGINE) as server, pytest.raises(SystemExit) as ended:
        main(["eval", "--task", "lm-eval:gsm9k", "--url", server.url])
    assert ended.value.code == 2
    assert "lm-eval has no task 'gsm9k'" in capsys.readouterr().err


def _call(*argv: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 0
