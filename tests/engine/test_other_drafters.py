"""Decoding types that are not drafters of this package: hidden states that are saved, and drafters
of other packages."""

import os
import textwrap
from collections import defaultdict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from local_engine import LocalEngine
from safetensors.torch import load_file
from tiny_models import make_checkpoint, reference_model

from penstock.errors import ConfigError

COMMON = dict(
    dtype="float32", device="cpu", max_seq_len=96, max_batch_size=3, max_num_tokens=16,
    scheduler_config={"capacity_scheduler_policy": "MAX_UTILIZATION"},
)  # fmt: skip
PROMPTS = [[(7 * i + n) % 50 + 3 for i in range(20 + 3 * n)] for n in range(5)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    return make_checkpoint(folder, "llama", num_hidden_layers=4) or folder


def saving(to: Path, **asked) -> dict:
    """A cache in which three prompts and their outputs do not fit: some come back."""
    cache = {"enable_block_reuse": False, "tokens_per_block": 8, "max_tokens": 9 * 8}
    asked = {"decoding_type": "SaveState", "output_directory": str(to), **asked}
    return {"kv_cache_config": cache, "speculative_config": asked}


@pytest.mark.parametrize("depth", [1, 2])
def test_hidden_states_of_prompts_are_saved_as_transformers_has_them(folder, tmp_path, depth):
    to, plain = tmp_path / "new" / "states", LocalEngine(folder, **COMMON)
    asked = {"eagle3_layers_to_capture": [2, 0, -1], "write_interval": 2, "file_prefix": "llama"}
    engine = LocalEngine(
        folder, **COMMON, **saving(to, **asked), disable_overlap_scheduler=depth == 1
    )
    assert engine.generate(PROMPTS, 12) == plain.generate(PROMPTS, 12)
    assert engine.counters.preemptions > 0 and engine.counters.drafted_tokens == 0
    engine.runner.drafting.drafter.finish()
    assert {path.name for path in to.iterdir()} == {f"llama_{n}.safetensors" for n in (2, 4, 5)}
    saved = defaultdict(dict)
    for path in to.iterdir():
        for name, tensor in load_file(path).items():
            number, _, kind = name.partition(".")
            saved[int(number)][kind] = tensor
    assert {*saved} == {1, 2, 3, 4, 5}
    assert sorted(one["input_ids"].tolist() for one in saved.values()) == sorted(PROMPTS)
    model = reference_model(folder).model
    for one in saved.values():
        with torch.no_grad():
            said = model(one["input_ids"][None], output_hidden_states=True)
        behind = said.hidden_states[1:]  # each layer; of the last one behind the norm
        torch.testing.assert_close(
            one["hidden_state"], said.last_hidden_state[0], rtol=1e-4, atol=1e-4
        )
        expected = torch.cat((behind[0], behind[2]), dim=-1)[0]
        torch.testing.assert_close(one["aux_hidden_states"], expected, rtol=1e-4, atol=1e-4)


def test_what_cannot_be_saved_is_refused(folder, tmp_path):
    settings = saving(tmp_path / "a")
    for wrong, why in (
        ({"kv_cache_config": {}}, "set kv_cache_config.enable_block_reuse to false"),
        ({"enable_attention_dp": True}, "leave enable_attention_dp, data_parallel_size and pi"),
        ({"pipeline_parallel_size": 2}, "SaveState: rank 0 writes the files"),
        (saving(tmp_path, eagle3_layers_to_capture=[4]), "but the model has 4 layers"),
        (saving(folder / "config.json"), "output_directory: "),
    ):
        with pytest.raises(ConfigError, match=why):
            LocalEngine(folder, **COMMON, **(settings | wrong))


PLUGIN = """
    from penstock.runtime.drafter import Drafter

    class Again(Drafter):
        def __init__(self, max_rows, max_seq_len, max_drafts, device):
            self.max_drafts = max_drafts

        def draft(self, step):
            last_N1 = step.token_ids_NW.gather(1, step.num_accepted_N[:, None] - 1)
            return last_N1.repeat(1, self.max_drafts)
"""


def test_a_drafter_of_another_package_is_found_by_its_name(folder, tmp_path, monkeypatch):
    (tmp_path / "again.py").write_text(textwrap.dedent(PLUGIN))
    info = tmp_path / "again-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: again\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[penstock.drafters]\nlast = again:Again\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)  # of other ranks
    asked = {"decoding_type": "user-provided", "drafter": "last", "max_draft_len": 3}
    asked |= {"adaptive_draft_len": False}
    engine = LocalEngine(folder, **COMMON, speculative_config=asked)
    counters, plain = engine.counters, LocalEngine(folder, **COMMON)
    assert engine.generate(PROMPTS, 12) == plain.generate(PROMPTS, 12)
    assert counters.drafted_tokens > 50
    before = counters.accepted_tokens
    assert engine.generate(PROMPTS, 12, logit_bias={9: 100.0}) == [[9] * 12] * len(PROMPTS)
    assert counters.accepted_tokens - before > 6 * len(PROMPTS)
    stages = LocalEngine(folder, **COMMON, speculative_config=asked, pipeline_parallel_size=2)
    try:
        assert stages.generate(PROMPTS, 12) == plain.generate(PROMPTS, 12)
        assert stages.counters.drafted_tokens > 50
    finally:
        stages.engine._ranks.stop()
        dist.destroy_process_group()
    with pytest.raises(ConfigError, match="no installed package has an entry point 'first' in pen"):
        LocalEngine(folder, **COMMON, speculative_config=asked | {"drafter": "first"})
