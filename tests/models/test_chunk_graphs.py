"""A step of prompts as graphs capture it, padded and built on the device, gives the same as alone.

There is no capture without a GPU: what would be captured runs anew for each replay.
"""

import numpy as np
import pytest
import torch
from graph_steps import Repeats, blocks_each, make_runner, plan_of
from tiny_models import make_checkpoint

from penstock.runtime.graphs import ChunkGraphs
from penstock.types.step import LateInputs

ARCHITECTURES = ("llama", "gpt_oss", "qwen3_next", "deepseek_v3")


STEPS = [
    [(0, 0, 16)],  # as large as the graph
    [(2, 0, 5), (1, 0, 7), (0, 16, 20)],  # one that does not sample yet
    [(1, 7, 21), (3, 0, 9)],
    [(4, 0, 3), (5, 0, 3), (6, 0, 3), (3, 9, 11)],  # more than a graph has entries for
]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_padded_steps_give_the_same_logits(architecture, tmp_path):
    make_checkpoint(tmp_path, architecture)
    torch.manual_seed(1)
    lengths = {0: 20, 1: 21, 2: 5, 3: 11, 4: 3, 5: 3, 6: 3}
    random = np.random.default_rng(0)
    texts = {row: random.integers(3, 90, num, np.int32) for row, num in lengths.items()}
    plain, padded = make_runner(tmp_path), make_runner(tmp_path)
    if not all(layer.captures_chunks for layer in padded._model.cache_layers()):
        assert architecture == "deepseek_v3"
        return
    graphs = ChunkGraphs(padded.chunk_step(64), (16, 32), padded._rows)
    graphs.capture(Repeats())
    padded._prompt_graphs = graphs
    for number, parts in enumerate(STEPS):
        for runner in (plain, padded):
            runner.forward(plan_of(number, texts, parts, blocks_each(plain)))
        want, got = plain._forwarded[number], padded._forwarded[number]
        assert graphs.fits(want.plan) == (number < 3)
        assert np.array_equal(want.rows, got.rows)
        assert torch.equal(want.rows_L, got.rows_L) and torch.equal(want.kv_lens_L, got.kv_lens_L)
        if len(want.rows):
            torch.testing.assert_close(got.logits_LV, want.logits_LV, atol=1e-5, rtol=1e-5)
        tokens = [r.sample(number, LateInputs()).wait().token_ids for r in (plain, padded)]
        assert np.array_equal(*tokens)
    assert torch.equal(plain._rows.lengths_R, padded._rows.lengths_R)
