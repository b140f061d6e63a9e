"""An INT8 cache: rounded as transformers' would be, through the whole engine."""

import json
import subprocess
import sys

import pytest
import torch
import transformers
from local_engine import LocalEngine
from paged_driver import load_model, mixed_run, prompts
from tiny_models import make_checkpoint, reference_model

NUM_TOKENS = 24
SETTINGS = {"device": "cpu", "num_threads": 1, "dtype": "float32"}
BLOCKS = {"tokens_per_block": 16, "max_tokens": 1024, "dtype": "int8"}
CLOSE = 1e-4  # of a logit; rounding moves them by 100 times as much


class RoundingCache(transformers.DynamicCache):
    """Keeps integers from -127 to 127 with a scale of each token and head."""

    def update(self, keys, values, *args, **kwargs):
        return super().update(_rounded(keys), _rounded(values), *args, **kwargs)


def _rounded(x):
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round() * scale


@pytest.fixture(scope="module", params=["llama", "qwen3", "gpt_oss"])
def folder(request, tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("int8_cache") / request.param, request.param)


def test_logits_are_those_of_transformers_that_rounds_keys_and_values(folder):
    theirs = reference_model(folder)
    texts = prompts(theirs.config.vocab_size)
    ours = mixed_run(load_model(folder, cache_dtype=torch.int8), texts)
    for text, logits in zip(texts, ours, strict=True):
        with torch.inference_mode():
            rounded = theirs(torch.tensor([text]), past_key_values=RoundingCache()).logits[0]
            plain = theirs(torch.tensor([text])).logits[0]
        errors = (logits - rounded).abs()
        # A key between two numbers may fall to either, here and there.
        assert errors.median() < CLOSE < 10 * CLOSE < (logits - plain).abs().median()


def test_a_reused_prefix_gives_the_same_tokens(folder):
    """Whole blocks, and the copy of a part of one, with their scales."""
    first, second = prompts(reference_model(folder).config.vocab_size, (50, 7))
    engine = LocalEngine(folder, **SETTINGS, kv_cache_config=BLOCKS)
    (alone,) = engine.generate([first], NUM_TOKENS)
    again = [first, first[:40] + second]
    ids = [engine.submit(prompt, NUM_TOKENS) for prompt in again]
    engine.run()
    assert [engine.deltas[rid][0].num_cached_tokens for rid in ids] == [49, 40]
    found = [engine.tokens(rid) for rid in ids]
    assert found[0] == alone
    fresh = LocalEngine(folder, **SETTINGS, kv_cache_config=BLOCKS | {"enable_block_reuse": False})
    assert fresh.generate(again, NUM_TOKENS) == found


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
