"""Few bits a weight through the whole engine: tokens of transformers, two ranks, while loading."""

import pytest
import torch
from local_engine import LocalEngine
from tiny_models import make_checkpoint, reference_model
from weight_only_models import SHAPE, make_weight_only_checkpoint

from penstock import LLM, SamplingParams
from penstock.errors import ConfigError

NUM_TOKENS = 16
CLOSE = 0.001  # of a logit; their spread is above 1
SETTINGS = {"device": "cpu", "num_threads": 1, "dtype": "float32"}


@pytest.fixture(scope="module", params=["awq", "gptq ordered", "nvfp4 modelopt"])
def folder(request, tmp_path_factory):
    return make_weight_only_checkpoint(tmp_path_factory.mktemp("coded") / "m", request.param)


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(10, 500, (n,), generator=generator).tolist() for n in (50, 7, 33)]


@torch.inference_mode()
def shortfall(model, prompt, tokens) -> float:
    """How far, at most, the tokens' logits lie below the best; 0 where greedy choices agree."""
    logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return float((logits.amax(-1) - chosen).max())


def test_tokens_are_those_of_transformers(folder, prompts):
    model = reference_model(folder / "plain")
    engine = LocalEngine(folder, **SETTINGS)
    for prompt, tokens in zip(prompts, engine.generate(prompts, NUM_TOKENS), strict=True):
        assert shortfall(model, prompt, tokens) < CLOSE


def test_two_ranks_share_the_layers(folder, prompts):
    model = reference_model(folder / "plain")
    with LLM(str(folder), **SETTINGS, tensor_parallel_size=2) as llm:
        answers = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True),
        )
    for prompt, answer in zip(prompts, answers, strict=True):
        assert shortfall(model, prompt, list(answer.outputs[0].token_ids)) < CLOSE


@pytest.mark.parametrize("made", ["fp8", "int8", "nf4"])
def test_a_plain_checkpoint_is_quantized_on_two_ranks(tmp_path, prompts, made):
    make_checkpoint(tmp_path, "llama", **SHAPE)
    model = reference_model(tmp_path)
    with LLM(str(tmp_path), **SETTINGS, tensor_parallel_size=2, quantization=made) as llm:
        answers = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True),
        )
    for prompt, answer in zip(prompts, answers, strict=True):
        assert shortfall(model, prompt, list(answer.outputs[0].token_ids)) < 1.0


def test_what_is_quantized_is_not_quantized_again(folder):
    with pytest.raises(ConfigError, match=r"quantization is fp8, but the checkpoint is quantized"):
        LocalEngine(folder, **SETTINGS, quantization="fp8")
