"""docs/troubleshooting.md quotes what Penstock says: each case is provoked, its words looked up."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import torch
from server_process import Server

from penstock.hub.folder import local_folder

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
QUOTED = [
    line
    for box in re.findall(r"(?ms)^```\n(.*?)^```$", PAGE)
    for line in box.splitlines()
]  # fmt: skip
TINY = local_folder("tiny")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")


def is_quoted(message: str) -> bool:
    """A quote ends with `...` where the rest depends on the machine."""
    return any(
        message == quote or (quote.endswith("...") and message.startswith(quote[:-3]))
        for quote in QUOTED
    )


def said_by(*arguments: object, program: tuple[str, ...] = ("serve",)) -> list[str]:
    command = [sys.executable, "-m", "penstock", *program, *map(str, arguments)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, env=env, timeout=240, check=False
    )
    assert done.returncode in (1, 2), done.stderr
    lines = (done.stdout + done.stderr).splitlines()
    return [re.sub(r"^[\d:]+ [EW] \[\w+\] ", "", line) for line in lines]


@pytest.fixture
def checkpoint(tmp_path):
    """A copy of the built-in model that may be spoiled."""
    return Path(shutil.copytree(TINY, tmp_path / "checkpoint"))


def check(lines: list[str], begin: str, path: Path | None = None, name: str = "") -> None:
    """The one line that begins so is quoted, where the page calls `path` /models/`name`."""
    if path is not None:
        lines = [line.replace(str(path), f"/models/{name}") for line in lines]
    [line] = [line for line in lines if line.startswith(begin)]
    assert is_quoted(line), line


def test_an_unknown_architecture(checkpoint):
    config = json.loads((checkpoint / "config.json").read_text())
    config["architectures"] = ["ExampleForCausalLM"]
    (checkpoint / "config.json").write_text(json.dumps(config))
    check(said_by(checkpoint, "--port", 0), "config.json of", checkpoint, "example")


def test_files_that_are_missing_or_cut_off(checkpoint, tmp_path):
    (tmp_path / "empty").mkdir()
    check(said_by(tmp_path / "empty"), "'/models/empty' has", tmp_path / "empty", "empty")
    [weights] = checkpoint.glob("*.safetensors")
    os.truncate(weights, 100_000)
    check(said_by(checkpoint, "--port", 0), "cannot read", checkpoint, "cut-off")
    weights.unlink()
    check(said_by(checkpoint, "--port", 0), "no *.safetensors", checkpoint, "no-weights")


def test_a_hub_that_cannot_be_reached():
    check(said_by("nvidia/Llama-3.3-70B-Instruct-FP8"), "model 'nvidia/")


def test_a_cache_that_is_too_large():
    lines = said_by(
        "tiny", "--port", 0, "--device", "cpu", "--set=kv_cache_config.max_tokens=1000000000"
    )
    check(lines, "kv_cache_config.max_tokens is")


@without_gpu
def test_gpus_that_are_not_there():
    check(said_by("tiny", "--port", 0, "--device", "cuda"), "device is cuda")
    check(said_by("tiny", "--port", 0, "--tp_size", 8), "tensor_parallel_size is 8")


def test_groups_of_experts_that_do_not_divide_the_ranks():
    sibling = ROOT / "tests" / "siblings" / "deepseek_v3"
    flags = ("--device", "cpu", "--tp_size", 4, "--ep_size", 3, "--trust_remote_code")
    lines = said_by(sibling, "--port", 0, *flags)
    check(lines, "moe_expert_parallel_size 3")
    check(lines, "trust_remote_code")


def test_a_misspelled_flag():
    check(said_by("tiny", "--max_batch_sise", 8), "error: ")
    check(said_by("tiny", "--max_num_seqs", 8), "error: ")


def test_a_port_that_another_program_has():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        lines = said_by("tiny", "--port", port)
    check([line.replace(str(port), "8000") for line in lines], "cannot listen")
    flags = ("--port", port, "--model", "tiny", "--dataset-name", "random", "--num-prompts", 1)
    check(said_by(*flags, program=("bench", "serve")), "error: the test request failed")


def test_a_prompt_that_is_too_long_and_the_port_of_a_penstock():
    settings = {"kv_cache_config": {"max_tokens": 64}, "max_seq_len": 2048}
    with Server("tiny", num_threads=1, **settings) as server:
        body = {"prompt": [5] * 66, "max_tokens": 200}
        reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        assert reply.status_code == 400
        assert is_quoted(reply.json()["error"]["message"])
        assert any(line in QUOTED for line in server.log.read_text().splitlines())
        lines = said_by("tiny", "--port", server.port)
    check([line.replace(str(server.port), "8000") for line in lines], "cannot listen")


def test_a_quote_that_is_not_what_is_said_is_seen():
    assert not is_quoted("cannot listen on localhost port 8000: something else")
    assert not is_quoted("")
