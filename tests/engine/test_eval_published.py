"""Published tasks through a real engine and a real server, beside transformers."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from server_process import Server
from tiny_models import make_checkpoint

from penstock.cli.main import main, trtllm_eval

ENGINE = ("--set", "num_threads=1", "--set", "kv_cache_config.max_tokens=4096")
WORDS = ("the", "river", "stone", "runs", "under", "a", "bridge", "cold", "and", "far")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def server(folder):
    with Server(folder, num_threads=1, kv_cache_config={"max_tokens": 4096}) as server:
        yield server


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Questions without sense, so that a random model is right by chance."""
    folder = tmp_path_factory.mktemp("data")
    rows = [
        {
            "activity_label": WORDS[i % 10],
            "ctx": " ".join(WORDS[(i * k) % 10] for k in range(1, 9)),
            "endings": [" ".join(WORDS[(i + k * j) % 10] for j in range(1, 5)) for k in range(4)],
            "label": i % 4,
        }
        for i in range(12)
    ]
    (folder / "hellaswag_validation.jsonl").write_text("\n".join(map(json.dumps, rows)))
    text = " ".join(WORDS[(i * i + i // 3) % 10] for i in range(300))
    (folder / "wiki.test.raw").write_text(text)
    sums = [{"question": f"{i} + 1?", "answer": f"#### {i + 1}"} for i in range(4)]
    (folder / "gsm8k_test.jsonl").write_text("\n".join(map(json.dumps, sums)))
    return folder


def call(*argv: object, entry=main) -> int:
    with pytest.raises(SystemExit) as ended:
        entry([str(one) for one in argv])
    return ended.value.code


@torch.inference_mode()
def theirs(folder: Path, context: str, ending: str) -> float:
    """The ending's log-probability, the way the library's users compute it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(context + ending, return_tensors="pt").input_ids
    begin = len(tokenizer(context).input_ids)
    logprobs = model(ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
    return float(logprobs[begin - 1 :].sum())


def test_endings_are_weighed_as_transformers_does_by_engine_and_server(
    folder, server, data, tmp_path
):
    outputs = [tmp_path / "engine.json", tmp_path / "server.json"]
    task = ("eval", "--task", "hellaswag", "--data", data, "--output")
    assert call(*task, outputs[0], folder, *ENGINE) == 0
    assert call(*task, outputs[1], "--url", server.url, "--tokenizer", folder) == 0
    mine, served = (json.loads(path.read_text()) for path in outputs)
    for ours, other in zip(mine["examples"], served["examples"], strict=True):
        assert ours["logprobs"] == pytest.approx(other["logprobs"], abs=2e-3)
        assert (ours["acc"], ours["acc_norm"]) == (other["acc"], other["acc_norm"])
    rows = [json.loads(line) for line in (data / "hellaswag_validation.jsonl").open()]
    for row, ours in list(zip(rows, mine["examples"], strict=True))[:3]:
        context = f"{row['activity_label']}: {row['ctx']}"
        expected = [theirs(folder, context, f" {ending}") for ending in row["endings"]]
        assert ours["logprobs"] == pytest.approx(expected, abs=2e-3)


def test_perplexity_is_that_of_transformers(folder, data, tmp_path, capsys):
    output = tmp_path / "out.json"
    task = ("eval", folder, "--task", "perplexity", "--data", data, "--max-input-len", 64)
    assert call(*task, "--output", output, *ENGINE) == 0
    seen = json.loads(output.read_text())["examples"]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer((data / "wiki.test.raw").read_text(), return_tensors="pt").input_ids
    with torch.inference_mode():
        loss = model(ids[:, :64], labels=ids[:, :64]).loss
    assert seen[0]["num_tokens"] == 63
    assert -seen[0]["logprob"] / 63 == pytest.approx(float(loss), rel=1e-4)
    assert sum(one["num_tokens"] for one in seen) == ids.shape[1] - 1
    assert "|perplexity|      1|none  |     0|token_perplexity|↓  |" in capsys.readouterr().out


def test_written_answers_are_the_same_by_engine_and_server(folder, server, data, tmp_path):
    outputs = [tmp_path / "engine.json", tmp_path / "server.json"]
    task = ("eval", "--task", "gsm8k", "--data", data, "--num-fewshot", 0, "--max-tokens", 8)
    assert call(*task, "--output", outputs[0], folder, *ENGINE) == 0
    assert call(*task, "--output", outputs[1], "--url", server.url) == 0
    mine, served = (json.loads(path.read_text())["examples"] for path in outputs)
    assert [one["said"] for one in mine] == [one["said"] for one in served]
    assert all(one["said"] for one in mine)


def test_an_echo_ends_with_the_token_that_was_made_even_if_it_ends_the_answer(server):
    """lm-eval leaves the last log-probability out and weighs all before it."""
    asked = {"prompt": [5, 6, 7], "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    free = server.post("/v1/completions", **asked)["choices"][0]
    [*_, made] = server.post("/v1/completions", **asked, detokenize=False)["choices"][0][
        "token_ids"
    ]
    stopped = server.post("/v1/completions", **asked, stop_token_ids=[made])["choices"][0]
    assert (free["finish_reason"], stopped["finish_reason"]) == ("length", "stop")
    assert len(free["logprobs"]["token_logprobs"]) == 4
    assert stopped["logprobs"] == free["logprobs"]


def test_trtllm_eval_takes_its_own_flags(folder, data, tmp_path, capsys):
    model = ("--model", folder, "--max_batch_size", 4, "--disable_kv_cache_reuse", *ENGINE)
    task = ("gsm8k", "--dataset_path", data, "--num_fewshot", 0, "--max_output_length", 4)
    out = ("--output_dir", tmp_path / "out", "--num_samples", 2)
    assert call(*model, *task, *out, entry=trtllm_eval) == 0
    assert len(json.loads((tmp_path / "out" / "gsm8k.json").read_text())["examples"]) == 2
    assert call(*model, *task, "--check_accuracy", entry=trtllm_eval) == 1  # below 30 %
    assert capsys.readouterr().out.count("|gsm8k|      3|flexible-extract|") == 2


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--model", "tiny", "mmmu", "--dataset_path", "."], "trtllm-eval mmmu is not available"),
        (["--model", "tiny", "gsm9k", "--dataset_path", "."], "no task 'gsm9k'; there are gsm8k"),
        (["--model", "tiny", "gsm8k"], "required: --dataset_path"),
    ],
)
def test_a_mistake_is_answered_at_once(argv, complaint, capsys):
    assert call(*argv, entry=trtllm_eval) == 2
    assert complaint in capsys.readouterr().err


def test_data_must_be_named(capsys):
    assert call("eval", "tiny", "--task", "mmlu") == 2
    assert "a folder with mmlu_test.jsonl" in capsys.readouterr().err
