"""Models with experts through the server: settings that change how, never what."""

import pytest
import torch
from gguf_models import QUANT, write_gguf
from server_process import Server
from tiny_models import make_checkpoint, reference_model

NUM_TOKENS = 24
COMMON = {"dtype": "float32", "device": "cpu", "skip_tokenizer_init": True}


@torch.inference_mode()
def greedy(model, prompt: list[int]) -> list[int]:
    out = model.generate(
        torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    return out[0, len(prompt) :].tolist()


def served(server: Server, prompt: list[int]) -> list[int]:
    reply = server.post(
        "/v1/completions", model="m", prompt=prompt, max_tokens=NUM_TOKENS, temperature=0,
        ignore_eos=True, detokenize=False,
    )  # fmt: skip
    return reply["choices"][0]["token_ids"]


@pytest.mark.parametrize(
    ("backend", "max_num_tokens", "expected", "reason"),
    [
        ("DEEPGEMM", 3, "torch", "preferred on a CPU; stands in for DEEPGEMM"),
        ("VANILLA", None, "reference", "set by moe_config.backend"),
    ],
)
def test_backends_give_the_tokens_of_transformers_and_are_logged(
    tmp_path, backend, max_num_tokens, expected, reason
):
    folder = make_checkpoint(tmp_path, "qwen3_moe", norm_topk_prob=True)
    model, prompt = reference_model(folder), list(range(20, 37))
    moe_config = {"backend": backend, "max_num_tokens": max_num_tokens}
    with Server(folder, **COMMON, moe_config=moe_config) as server:
        assert served(server, prompt) == greedy(model, prompt)
        choices = {choice["setting"]: choice for choice in server.version()["choices"]}
        chosen = choices["moe_backend"]
        assert (chosen["value"], chosen["reason"]) == (expected, reason)
        lines = server.log.read_text().splitlines()
    assert sum(f"experts run on {expected}: {reason}" in line for line in lines) == 1


@pytest.mark.parametrize("arch", ["mixtral", "qwen2_moe"])
def test_a_gguf_file_with_experts_is_served_from_its_codes(tmp_path, arch):
    model = reference_model(make_checkpoint(tmp_path / "hf", arch))
    path, prompt = tmp_path / "model.gguf", list(range(30, 41))
    held = write_gguf(path, model, QUANT.Q8_0)
    model.load_state_dict({n: torch.from_numpy(v) for n, v in held.items()}, strict=False)
    with Server(path, **COMMON, num_threads=2) as server:
        assert served(server, prompt) == greedy(model, prompt)
        (num_bytes,) = server.version()["rank_weight_bytes"]
    num_numbers = sum(parameter.numel() for parameter in model.parameters())
    assert num_bytes < 1.5 * num_numbers  # eight bits each and their scales, norms in fp32
