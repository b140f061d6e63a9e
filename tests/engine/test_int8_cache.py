"""An INT8 cache: rounded as transformers' would be, through the whole engine."""

import json
import subprocess
import sys

import pytest
import torch
from local_engine import LocalEngine
from paged_driver import load_model
from rounded_caches import SETTINGS, check_logits, check_reused_prefix
from tiny_models import make_checkpoint, reference_model


def rounded(x):
    """Integers from -127 to 127 with a scale of each token and head."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round() * scale


@pytest.fixture(scope="module", params=["llama", "qwen3", "gpt_oss"])
def folder(request, tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("int8_cache") / request.param, request.param)


def test_logits_are_those_of_transformers_that_rounds_keys_and_values(folder):
    check_logits(folder, load_model(folder, cache_dtype=torch.int8), rounded, rounded)


def test_a_reused_prefix_gives_the_same_tokens(folder):
    check_reused_prefix(folder, "int8")


def test_memory_is_planned_with_the_scales(folder):
    plain, whole = (
        LocalEngine(folder, **SETTINGS, kv_cache_config={"dtype": dtype}).info.memory
        for dtype in ("float32", "int8")
    )
    size = reference_model(folder).config.head_dim
    assert whole["kv_block_bytes"] * 4 * size == plain["kv_block_bytes"] * (size + 4)


def test_skills_are_those_of_the_plain_cache(tmp_path):
    scores = tmp_path / "scores.json"
    command = [sys.executable, "-m", "penstock", "eval", "tiny", "--task", "skills"]
    command += ["--limit", "4", "--output", str(scores)]
    command += ["--set", "device=cpu", "--set", "max_seq_len=1024", "--set", "num_threads=1"]
    command += ["--set", "kv_cache_config.dtype=int8"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(scores.read_text())["total"]["score"] >= 0.95
