"""Families that have no server of their own in `test_parity.py`, through the engine: tokens of
transformers alone, in a batch, from the prefix cache, in chunks and after preemptions."""

import pytest
import torch
from local_engine import LocalEngine
from tiny_models import make_checkpoint, reference_model

NUM_TOKENS = 24
LONG = {"max_position_embeddings": 256}
FAMILIES = {  # prompts are longer than a window or a chunk
    "gemma2": {"sliding_window": 24, "attn_logit_softcapping": 2.0},
    "gemma3_text": {"sliding_window": 24},
    "glm4": {},
    "glm4_moe": {},
    "llama4_text": {"attention_chunk_size": 24, "floor_scale": 16},
    "nemotron": {},
    "phi3": {"sliding_window": 24, "rope_parameters": {"partial_rotary_factor": 0.75}},
}
SETTINGS = {"device": "cpu", "num_threads": 1, "dtype": "float32"}
TIGHT = {  # 12 blocks of 16 tokens: the sequences do not fit together
    "max_num_tokens": 24,
    "kv_cache_config": {"max_tokens": 192, "tokens_per_block": 16},
    "scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION"},
}


class Family:
    def __init__(self, folder, arch):
        self.folder = make_checkpoint(folder, arch, **LONG, **FAMILIES[arch])
        self._model = reference_model(self.folder)
        generator = torch.Generator().manual_seed(7)
        self.prompts = [
            torch.randint(10, 500, (n,), generator=generator).tolist() for n in (50, 7, 64, 33)
        ]
        self.expected = [self._generate(prompt) for prompt in self.prompts]

    @torch.inference_mode()
    def _generate(self, prompt):
        out = self._model.generate(
            torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None,
            pad_token_id=0,
        )  # fmt: skip
        return out[0, len(prompt) :].tolist()


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    return Family(tmp_path_factory.mktemp("family"), request.param)


def test_alone_in_a_batch_and_from_the_prefix_cache(family):
    engine = LocalEngine(family.folder, **SETTINGS)
    alone = engine.generate(family.prompts[:1], NUM_TOKENS, ignore_eos=True)
    assert alone == family.expected[:1] and engine.counters.prefix_hit_tokens == 0
    assert engine.generate(family.prompts, NUM_TOKENS, ignore_eos=True) == family.expected
    assert engine.counters.prefix_hit_tokens >= 48


def test_in_chunks_and_after_preemptions(family):
    engine = LocalEngine(family.folder, **SETTINGS, **TIGHT)
    assert engine.generate(family.prompts, NUM_TOKENS, ignore_eos=True) == family.expected
    assert engine.counters.prefill_chunks > len(family.prompts)
    assert engine.counters.preemptions >= 1
