"""A small trained model: its greedy story is the one transformers tells, token for token."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import save_file
from server_process import Server

STORIES = Path(__file__).parents[3] / "shared" / "models" / "stories260K"
pytestmark = pytest.mark.skipif(not STORIES.exists(), reason="the trained model is not beside us")
BOS, NUM_TOKENS = 1, 200


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The checkpoint in HF layout. It rotates neighbouring pairs, HF rotates halves."""
    raw = (STORIES / "stories260K.bin").read_bytes()
    dim, hidden, layers, heads, kv_heads, vocab, seq = struct.unpack_from("<7i", raw)
    values = np.frombuffer(raw, np.float32, offset=28)
    head_size, at = dim // heads, 0

    def take(*shape: int) -> np.ndarray:
        nonlocal at
        at += int(np.prod(shape))
        return values[at - int(np.prod(shape)) : at].reshape(shape).copy()

    def halves(weight: np.ndarray) -> np.ndarray:
        pairs = weight.reshape(-1, head_size // 2, 2, dim)
        return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(-1, dim))

    tensors = {"model.embed_tokens.weight": take(vocab, dim)}
    per_layer = {
        "input_layernorm": (dim,), "self_attn.q_proj": (dim, dim),
        "self_attn.k_proj": (kv_heads * head_size, dim),
        "self_attn.v_proj": (kv_heads * head_size, dim), "self_attn.o_proj": (dim, dim),
        "post_attention_layernorm": (dim,), "mlp.gate_proj": (hidden, dim),
        "mlp.down_proj": (dim, hidden), "mlp.up_proj": (hidden, dim),
    }  # fmt: skip
    for name, shape in per_layer.items():
        for layer, weight in enumerate(take(layers, *shape)):
            rotated = name.endswith(("q_proj", "k_proj"))
            tensors[f"model.layers.{layer}.{name}.weight"] = halves(weight) if rotated else weight
    tensors["model.norm.weight"] = take(dim)
    path = tmp_path_factory.mktemp("stories260K")
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": dim,
        "intermediate_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "vocab_size": vocab, "max_position_embeddings": seq,
        "rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 10000.0,
        "tie_word_embeddings": True, "torch_dtype": "float32", "bos_token_id": BOS,
        "eos_token_id": 2,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    return path


def read_pieces() -> list[bytes]:
    raw, at, pieces = (STORIES / "tok512.bin").read_bytes(), 4, []
    while at < len(raw):
        _, length = struct.unpack_from("<fi", raw, at)
        pieces.append(raw[at + 8 : at + 8 + length])
        at += 8 + length
    return pieces


def test_the_story_is_the_one_transformers_tells(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompt = torch.tensor([[BOS]])
    expected = model.generate(prompt, max_new_tokens=NUM_TOKENS, do_sample=False)[0, 1:].tolist()
    with Server(folder, skip_tokenizer_init=True) as server:
        reply = server.post(
            "/v1/completions",
            model="stories",
            prompt=[BOS],
            max_tokens=NUM_TOKENS,
            temperature=0,
            detokenize=False,
        )
        assert reply["choices"][0]["token_ids"] == expected
    pieces = read_pieces()
    story = b"".join(pieces[i] for i in expected).decode().strip()
    assert story.startswith("Once upon a time, there was a little"), story
