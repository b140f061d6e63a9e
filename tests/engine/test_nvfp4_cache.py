"""An NVFP4 cache: rounded as transformers' would be, through the whole engine."""

import json
import shutil
from functools import partial

import pytest
import torch
from local_engine import LocalEngine
from paged_driver import load_model, prompts
from rounded_caches import BLOCKS, NUM_TOKENS, SETTINGS, check_logits, check_reused_prefix
from safetensors.torch import load_file, save_file
from tiny_models import make_checkpoint, reference_model

NVFP4_BLOCKS = BLOCKS | {"dtype": "nvfp4"}
NVFP4 = torch.float4_e2m1fn_x2
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def rounded_to_nvfp4(scale, x):
    """The nearest of the numbers there are, by their distance."""
    groups = x.unflatten(-1, (-1, 16))
    inner = (groups.abs().amax(-1, keepdim=True) / 6 / scale).clamp(max=448)
    factor = inner.to(torch.float8_e4m3fn).float() * scale
    ratio = torch.where(factor > 0, groups / factor, 0.0)
    nearest = (ratio.abs().unsqueeze(-1) - E2M1).abs().argmin(-1)
    return (E2M1[nearest] * ratio.sign() * factor).flatten(-2)


@pytest.fixture(scope="module", params=["llama", "qwen3", "gpt_oss"])
def folder(request, tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("nvfp4_cache") / request.param, request.param)


def check_rounded_logits(folder, scales):
    model = load_model(folder, finished=True, cache_dtype=NVFP4)
    check_logits(folder, model, *(partial(rounded_to_nvfp4, scale) for scale in scales))


def scales_of(folder, cache_dtype):
    model = load_model(folder, finished=True, cache_dtype=cache_dtype)
    (found,) = {layer.cache_scales for layer in model.cache_layers()}
    return found


def test_logits_are_those_of_transformers_that_rounds_keys_and_values(folder):
    scales = scales_of(folder, NVFP4)
    assert scales == (1 / 4, 1 / 16)
    check_rounded_logits(folder, scales)


def test_a_checkpoint_made_for_it_brings_its_scales(tmp_path):
    """As ModelOpt writes them. Headroom, a power of two, changes nothing where none is needed."""
    plain = make_checkpoint(tmp_path / "llama", "llama")
    made = tmp_path / "modelopt"
    shutil.copytree(plain, made)
    (made / "hf_quant_config.json").write_text(
        json.dumps({"quantization": {"quant_algo": None, "kv_cache_quant_algo": "NVFP4"}})
    )
    tensors = load_file(made / "model.safetensors")
    scales = (0.013, 0.0047)
    for layer in range(reference_model(plain).config.num_hidden_layers):
        for name, scale in zip("kv", scales, strict=True):
            at = f"model.layers.{layer}.self_attn.{name}_proj.{name}_scale"
            tensors[at] = torch.tensor(scale)
    save_file(tensors, made / "model.safetensors", {"format": "pt"})
    engine = LocalEngine(made, **SETTINGS, kv_cache_config=BLOCKS)
    assert engine.engine.config.kv_dtype == "float4_e2m1fn_x2"
    assert len(engine.generate([[5, 6, 7]], 4)[0]) == 4
    check_rounded_logits(made, scales)
    assert scales_of(made, NVFP4) == pytest.approx([8 * scale for scale in scales])
    assert scales_of(made, torch.float8_e4m3fn) == (1.0, 1.0)  # those of another cache


def test_a_reused_prefix_gives_the_same_tokens(folder):
    check_reused_prefix(folder, "nvfp4")


def test_a_prompt_in_chunks_gives_the_same_tokens(folder):
    (prompt,) = prompts(reference_model(folder).config.vocab_size, (90,))
    whole, cut = (
        LocalEngine(folder, **SETTINGS, kv_cache_config=NVFP4_BLOCKS, max_num_tokens=size)
        for size in (128, 13)
    )
    assert cut.generate([prompt], NUM_TOKENS) == whole.generate([prompt], NUM_TOKENS)


def test_drafts_that_are_wrong_leave_nothing_in_the_cache(folder):
    prompt = prompts(reference_model(folder).config.vocab_size, (6,))[0] * 8
    ngrams = {"decoding_type": "NGram", "max_draft_len": 3, "adaptive_draft_len": False}
    plain = LocalEngine(folder, **SETTINGS, kv_cache_config=NVFP4_BLOCKS)
    drafting = LocalEngine(
        folder, **SETTINGS, kv_cache_config=NVFP4_BLOCKS, speculative_config=ngrams
    )
    assert drafting.generate([prompt], 2 * NUM_TOKENS) == plain.generate([prompt], 2 * NUM_TOKENS)
    assert drafting.counters.drafted_tokens > drafting.counters.accepted_tokens


def test_memory_is_planned_with_9_bytes_for_16_numbers(folder):
    plain, small = (
        LocalEngine(folder, **SETTINGS, kv_cache_config={"dtype": dtype}).info.memory
        for dtype in ("float32", "nvfp4")
    )
    assert small["kv_block_bytes"] * 64 == plain["kv_block_bytes"] * 9
