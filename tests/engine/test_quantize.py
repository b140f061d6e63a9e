"""`penstock quantize` on the tiny sibling: what is written is served, and has the same skills."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from penstock.errors import ConfigError
from penstock.hub.folder import local_folder
from penstock.quantize import run as quantize_run
from penstock.quantize.formats import FORMATS
from penstock.quantize.run import REPORT, Task, quantize

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


def task(calib: Path, output: Path, format="fp8", model="tiny") -> Task:
    return Task(
        model=model, format=format, calib=calib, output=output, eval=None, num_samples=24,
        length=LENGTH, device="cpu",
    )  # fmt: skip


@pytest.mark.parametrize("format", FORMATS)
def test_a_quantised_checkpoint_has_the_skills_of_the_plain_one(calib, tmp_path, format):
    output = tmp_path / "made"
    command = [sys.executable, "-m", "penstock", "quantize", "tiny", "--format", format]
    command += ["--calib", str(calib), "--output", str(output), "--num_samples", "24"]
    command += ["--length", str(LENGTH), "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "perplexity" in done.stdout and "largest errors of 42" in done.stdout
    report = json.loads((output / REPORT).read_text())
    assert len(report["errors"]) == 42 and 0 < max(report["errors"].values()) < 0.2
    change = report["perplexity_after"] / report["perplexity_before"] - 1
    assert abs(change) < (0.05 if format in ("fp8", "int8_sq") else 0.25)
    total = sum(path.stat().st_size for path in output.glob("*.safetensors"))
    assert total < (TINY / "model.safetensors").stat().st_size * 0.75

    scores = tmp_path / "scores.json"
    command = [sys.executable, "-m", "penstock", "eval", str(output), "--task", "skills"]
    command += ["--limit", "10", "--output", str(scores), "--set", "device=cpu"]
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


def test_what_is_quantised_already_and_folders_in_use_are_refused(calib, tmp_path):
    output = tmp_path / "made"
    quantize(task(calib, output), lambda number, total: None)
    with pytest.raises(ConfigError, match="is quantised already"):
        quantize(task(calib, tmp_path / "again", model=str(output)), lambda number, total: None)
    with pytest.raises(ConfigError, match="is not empty"):
        quantize(task(calib, output), lambda number, total: None)
