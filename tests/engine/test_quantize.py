"""`penstock quantize` on the tiny sibling: what is written is served, and has the same skills."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from gguf_models import write_gguf
from safetensors import safe_open
from safetensors.torch import load_file
from tiny_models import make_checkpoint, reference_model

from penstock.errors import ConfigError
from penstock.hub.folder import local_folder
from penstock.ptq import run as quantize_run
from penstock.ptq.formats import FORMATS
from penstock.ptq.run import REPORT, Task, quantize
from penstock.text.tokenizer import Tokenizer

TINY = local_folder("tiny")
LENGTH = 64


@pytest.fixture(scope="module")
def calib(tmp_path_factory) -> Path:
    """Chats of the kind it has learned."""
    file = tmp_path_factory.mktemp("calib") / "chats.txt"
    lines = (TINY / "skills.jsonl").read_text().splitlines()
    texts = [
        f"<|im_start|>user\n{example['messages'][-1]['content']}<|im_end|>\n"
        for example in map(json.loads, lines)
    ]
    file.write_text("".join(texts))
    return file


def task(calib: Path, output: Path, format="fp8", model="tiny", exclude=(), inputs=None) -> Task:
    return Task(
        model=model, format=format, calib=calib, output=output, eval=None, exclude=exclude,
        inputs=inputs, num_samples=24, length=LENGTH, device="cpu",
    )  # fmt: skip


@pytest.mark.parametrize("format", FORMATS)
def test_a_quantized_checkpoint_has_the_skills_of_the_plain_one(calib, tmp_path, format):
    output = tmp_path / "made"
    if format == "fp8":  # as a user does it
        command = [sys.executable, "-m", "penstock", "quantize", "tiny", "--format", format]
        command += ["--calib", str(calib), "--output", str(output), "--num_samples", "24"]
        command += ["--length", str(LENGTH), "--device", "cpu"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "perplexity" in done.stdout and "largest errors of 42" in done.stdout
    else:
        quantize(task(calib, output, format), lambda number, total: None)
    report = json.loads((output / REPORT).read_text())
    assert len(report["errors"]) == 42 and 0 < max(report["errors"].values()) < 0.2
    change = report["perplexity_after"] / report["perplexity_before"] - 1
    assert abs(change) < (0.05 if format in ("fp8", "int8_sq") else 0.25)
    total = sum(path.stat().st_size for path in output.glob("*.safetensors"))
    assert total < (TINY / "model.safetensors").stat().st_size * 0.75

    scores = tmp_path / "scores.json"
    command = [sys.executable, "-m", "penstock", "eval", str(output), "--task", "skills"]
    command += ["--limit", "4", "--output", str(scores), "--set", "device=cpu"]
    command += ["--set", "max_seq_len=1024", "--set", "num_threads=1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(scores.read_text())["total"]["score"] >= 0.95


def test_an_interrupted_run_goes_on(calib, tmp_path, monkeypatch):
    output, done = tmp_path / "made", []

    def stop(number: int, total: int) -> None:
        if number == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(task(calib, output), stop)
    assert len(list(output.glob("*.safetensors"))) == 3
    with pytest.raises(ConfigError, match="a run with other settings"):
        quantize(task(calib, output, "int8_sq"), stop)
    original = quantize_run.quantize_block
    monkeypatch.setattr(
        quantize_run, "quantize_block", lambda *args: done.append(args[1]) or original(*args)
    )
    report = quantize(task(calib, output), lambda number, total: None)
    assert done == ["layers.3", "layers.4", "layers.5"] and len(report.errors) == 42

    fresh = quantize(task(calib, tmp_path / "fresh"), lambda number, total: None)
    assert fresh.errors == report.errors
    for path in (tmp_path / "fresh").glob("*.safetensors"):
        with safe_open(path, "pt") as ours, safe_open(output / path.name, "pt") as theirs:
            for name in ours.keys():  # noqa: SIM118
                one, other = ours.get_tensor(name), theirs.get_tensor(name)
                assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), name


def test_a_gguf_file_becomes_the_checkpoint_that_the_folder_it_was_made_of_becomes(calib, tmp_path):
    """Every tensor, tokenizer, template and configuration, as transformers reads them."""
    file, made, expected = tmp_path / "tiny.gguf", tmp_path / "made", tmp_path / "expected"
    write_gguf(file, reference_model(TINY), tokenizer=TINY)
    for model, output in ((str(file), made), ("tiny", expected)):
        quantize(task(calib, output, "int8_sq", model), lambda number, total: None)
    for path in expected.glob("*.safetensors"):
        theirs, ours = load_file(path), load_file(made / path.name)
        assert theirs.keys() == ours.keys()
        for name, tensor in theirs.items():
            assert ours[name].dtype == tensor.dtype and torch.equal(ours[name], tensor), name
    ours, theirs = (transformers.AutoConfig.from_pretrained(folder) for folder in (made, expected))
    for name in ("hidden_size", "head_dim", "rope_parameters", "quantization_config", "dtype"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.architectures == theirs.architectures
    ours, theirs = (transformers.AutoTokenizer.from_pretrained(folder) for folder in (made, TINY))
    text = "What is 12 + 34? It's <think> 46\n\n"
    assert ours(text).input_ids == theirs(text).input_ids
    chat = [{"role": "user", "content": text}]
    shown = [one.apply_chat_template(chat, tokenize=False) for one in (ours, theirs)]
    assert shown[0] == shown[1]


def test_modules_that_are_excluded_stay_as_they_are(calib, tmp_path):
    """Query, key and value together, as they are multiplied; the checkpoint says so and is read."""
    made = quantize(
        task(calib, tmp_path / "made", "int8_sq", exclude=("down_proj", "layers.0.*.k_proj")),
        lambda number, total: None,
    )
    assert len(made.errors) == 42 - 6 - 3 and not any("down_proj" in name for name in made.errors)
    plain = load_file(TINY / "model.safetensors")
    for path in (tmp_path / "made").glob("*.safetensors"):
        for name, tensor in load_file(path).items():
            if "down_proj" in name or "layers.0.self_attn.q_proj" in name:
                assert torch.equal(tensor, plain[name]), name


@pytest.mark.parametrize("inputs", [None, 8, 16])
def test_a_small_model_keeps_the_inputs_of_fp8_unless_asked(calib, tmp_path, inputs):
    report = quantize(task(calib, tmp_path / "made", inputs=inputs), lambda number, total: None)
    assert report.input_bits == (inputs or 16) and abs(report.change) < 0.05
    config = json.loads((tmp_path / "made" / "config.json").read_text())["quantization_config"]
    rounded = config["config_groups"]["group_0"]["input_activations"]
    assert (rounded is None) == (report.input_bits == 16)


@pytest.mark.parametrize("format", ["gptq", "awq"])
def test_random_tokens_are_read_beside_the_text_unless_sizes_are_moved(
    calib, tmp_path, monkeypatch, format
):
    def stop(model, ids, length, device):
        raise StopIteration(ids)

    monkeypatch.setattr(quantize_run, "Texts", stop)
    with pytest.raises(StopIteration) as caught:
        quantize(task(calib, tmp_path / "made", format), lambda number, total: None)
    text, (ids,) = 24 * LENGTH, caught.value.args
    expected = Tokenizer.from_folder(TINY).encode(calib.read_text())[:text]
    assert ids[:text] == expected
    others = ids[text:]
    assert len(others) == (8 * LENGTH if format == "gptq" else 0)
    assert not others or len(set(others)) > len(set(expected))


def test_inputs_that_a_format_does_not_have_are_refused(calib, tmp_path):
    with pytest.raises(ConfigError, match="--inputs is 8, but layers of nvfp4 have inputs of 16"):
        quantize(task(calib, tmp_path / "made", "nvfp4", inputs=8), lambda number, total: None)


def test_what_is_quantized_already_and_folders_in_use_are_refused(calib, tmp_path):
    output = tmp_path / "made"
    quantize(task(calib, output), lambda number, total: None)
    with pytest.raises(ConfigError, match="is quantized already"):
        quantize(task(calib, tmp_path / "again", model=str(output)), lambda number, total: None)
    with pytest.raises(ConfigError, match="is not empty"):
        quantize(task(calib, output), lambda number, total: None)


def test_norms_on_both_sides_take_up_their_own_scales(calib, tmp_path):
    """Gemma calls another norm by the name of the one that scales move into."""
    folder = make_checkpoint(tmp_path / "plain", "gemma2", hidden_size=128, intermediate_size=256)
    quantize(task(calib, tmp_path / "made", "awq", str(folder)), lambda done, total: None)
    before, after = load_file(folder / "model.safetensors"), {}
    for file in (tmp_path / "made").glob("*.safetensors"):
        after |= load_file(file)
    block = "model.layers.0."
    for name in ("input_layernorm", "pre_feedforward_layernorm"):
        assert not torch.equal(after[f"{block}{name}.weight"], before[f"{block}{name}.weight"])
    for name in ("post_attention_layernorm", "post_feedforward_layernorm"):
        assert torch.equal(after[f"{block}{name}.weight"], before[f"{block}{name}.weight"])
    report = json.loads((tmp_path / "made" / REPORT).read_text())
    assert 0.5 < report["perplexity_after"] / report["perplexity_before"] < 2.0


def test_fused_matrices_are_refused_with_the_way_out(calib, tmp_path):
    folder = make_checkpoint(tmp_path / "plain", "phi3")
    with pytest.raises(ConfigError, match=r"several matrices .* serve it with --quantization"):
        quantize(task(calib, tmp_path / "made", "fp8", str(folder)), lambda done, total: None)
