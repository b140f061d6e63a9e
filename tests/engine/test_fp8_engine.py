"""8-bit floats through the whole engine: weights, cache, reused prefixes, two ranks."""

import pytest
import torch
from fp8_models import K_SCALE, V_SCALE, RoundingCache, make_fp8_checkpoint, truth
from local_engine import LocalEngine

from penstock import LLM, SamplingParams

NUM_TOKENS = 24
CLOSE = 0.05  # of a logit; their spread is above 1
SETTINGS = {"device": "cpu", "num_threads": 1, "dtype": "float32"}
BLOCKS = {"tokens_per_block": 16, "max_tokens": 1024}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_fp8_checkpoint(tmp_path_factory.mktemp("fp8") / "modelopt", "modelopt")


@pytest.fixture(scope="module")
def model(folder):
    return truth(folder, "modelopt")


@pytest.fixture(scope="module")
def prompts(model):
    generator = torch.Generator().manual_seed(7)
    vocab_size = model.config.vocab_size
    return [torch.randint(10, vocab_size, (n,), generator=generator).tolist() for n in (50, 7, 33)]


@torch.inference_mode()
def shortfall(model, prompt, tokens, cache) -> float:
    """How far, at most, the tokens' logits lie below the best; 0 where greedy choices agree."""
    logits = model(torch.tensor([prompt + tokens]), past_key_values=cache).logits[0]
    logits = logits[len(prompt) - 1 : -1]
    assert logits.std() > 1.0
    chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return float((logits.amax(-1) - chosen).max())


@pytest.mark.parametrize("dtype", ["auto", "fp8", "float32"])
def test_tokens_are_those_of_transformers_with_the_same_rounding(folder, model, prompts, dtype):
    engine = LocalEngine(folder, **SETTINGS, kv_cache_config=BLOCKS | {"dtype": dtype})
    for prompt, tokens in zip(prompts, engine.generate(prompts, NUM_TOKENS), strict=True):
        cache = None if dtype == "float32" else RoundingCache(K_SCALE, V_SCALE)
        assert shortfall(model, prompt, tokens, cache) < CLOSE


def test_a_reused_prefix_gives_the_same_tokens(folder, prompts):
    """Whole blocks, and the copy of a part of one."""
    engine = LocalEngine(folder, **SETTINGS, kv_cache_config=BLOCKS | {"dtype": "fp8"})
    first = engine.generate(prompts[:1], NUM_TOKENS)
    again = [prompts[0], prompts[0][:40] + prompts[1]]
    ids = [engine.submit(prompt, NUM_TOKENS) for prompt in again]
    engine.run()
    assert [engine.deltas[rid][0].num_cached_tokens for rid in ids] == [49, 40]
    found = [engine.tokens(rid) for rid in ids]
    assert found[0] == first[0]
    fresh = LocalEngine(
        folder,
        **SETTINGS,
        kv_cache_config=BLOCKS | {"dtype": "fp8", "enable_block_reuse": False},
    )
    assert fresh.generate(again, NUM_TOKENS) == found


def test_the_same_memory_holds_four_times_the_tokens_of_fp32(folder):
    plans = [
        LocalEngine(folder, **SETTINGS, kv_cache_config={"dtype": dtype}).info.memory
        for dtype in ("float32", "fp8")
    ]
    assert plans[0]["kv_block_bytes"] == 4 * plans[1]["kv_block_bytes"]
    assert plans[0]["weights_bytes"] == plans[1]["weights_bytes"] - 2 * 2 * 4  # and four scales


def test_two_ranks_share_the_layers_and_their_scales(folder, model, prompts):
    with LLM(str(folder), **SETTINGS, tensor_parallel_size=2, kv_cache_config=BLOCKS) as llm:
        answers = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True),
        )
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = list(answer.outputs[0].token_ids)
        assert shortfall(model, prompt, tokens, RoundingCache(K_SCALE, V_SCALE)) < CLOSE
