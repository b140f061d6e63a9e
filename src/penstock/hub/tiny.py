"""The built-in model: a small Llama with its own tokenizer and chat template, made from a seed.

It is no trained model. Its embedding and head hold the word-to-word statistics of a made-up text,
so that it answers in readable sentences and ends them; the blocks between are random and small.
Good for trying the server, for demos and for tests: no download, no torch.
"""

# V vocabulary, D hidden size, C classes of tokens with the same successors

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message.role + '\\n' + (message.content or '') + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)

_MAX_VOCAB_SIZE = 768
_HIDDEN_SIZE = 256
_INNER_SIZE = 512
_NUM_LAYERS = 2
_NUM_HEADS = 4
_NUM_KV_HEADS = 2
_HEAD_SIZE = _HIDDEN_SIZE // _NUM_HEADS
_MAX_POSITION = 8192
_NUM_ANSWERS = 4000
_LOG_NEVER = -12.0  # log-probability of a token that never follows
_BLOCK_SCALE = 0.02  # size of what a random block adds to the stream, whose own size is 1

_SUBJECTS = (
    "The river", "The pipe", "A small engine", "The gate", "The old mill", "The pump", "Cold water",
    "The turbine", "A steady stream", "The valve", "The lake above the valley", "The morning rain",
)  # fmt: skip
_VERBS = (
    "feeds", "turns", "moves", "fills", "opens", "follows", "carries", "drives", "cools", "reaches",
)  # fmt: skip
_OBJECTS = (
    "the wheel", "a long channel", "the heavy stones", "the town below", "every field",
    "the quiet machine", "its own shadow", "the next lock", "a copper tank", "the whole valley",
)  # fmt: skip
_ENDINGS = (
    "without a sound", "all night", "before the sun is up", "as it always did", "in a few minutes",
    "because the pressure is high", "when somebody asks", "until the tank is full",
    "with little effort",
)  # fmt: skip
_OPENINGS = ("Well.", "Of course.", "Let me think.", "Yes.", "In short:", "That depends.")


def write_tiny_model(folder: Path, seed: int = 0) -> None:
    """Write a whole model folder: configuration, weights, tokenizer, chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    answers = _answers(seed)
    tokenizer = write_tokenizer(folder, answers)
    save_file(_weights(tokenizer, answers, seed), folder / "model.safetensors", {"format": "pt"})
    end, pad = tokenizer.token_to_id(TURN_END), tokenizer.token_to_id(END_OF_TEXT)
    ids = {"bos_token_id": None, "eos_token_id": [end, pad], "pad_token_id": pad}
    _write_json(folder / "config.json", _config(tokenizer.get_vocab_size()) | ids)
    _write_json(folder / "generation_config.json", ids)


def write_tokenizer(folder: Path, texts: list[str] | None = None) -> Tokenizer:
    """Train a byte-level BPE tokenizer with ChatML tokens; write it with its chat template."""
    texts = texts or _answers(0)
    special = [AddedToken(text, special=True) for text in (END_OF_TEXT, TURN_START, TURN_END)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        (f"system\n user\n assistant\n {text}" for text in texts),
        trainers.BpeTrainer(
            vocab_size=_MAX_VOCAB_SIZE,
            special_tokens=special,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": TURN_END,
            "pad_token": END_OF_TEXT,
            "model_max_length": _MAX_POSITION,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    return tokenizer


def _answers(seed: int) -> list[str]:
    """Made-up answers of one to four sentences."""
    rng = random.Random(seed)

    def sentence() -> str:
        words = [rng.choice(_SUBJECTS), rng.choice(_VERBS), rng.choice(_OBJECTS)]
        return " ".join([*words, rng.choice(_ENDINGS)]) + "."

    return [
        " ".join([rng.choice(_OPENINGS), *(sentence() for _ in range(rng.randint(1, 4)))])
        for _ in range(_NUM_ANSWERS)
    ]


def _config(vocab_size: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": _HIDDEN_SIZE,
        "intermediate_size": _INNER_SIZE,
        "num_hidden_layers": _NUM_LAYERS,
        "num_attention_heads": _NUM_HEADS,
        "num_key_value_heads": _NUM_KV_HEADS,
        "head_dim": _HEAD_SIZE,
        "max_position_embeddings": _MAX_POSITION,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }


def _weights(tokenizer: Tokenizer, answers: list[str], seed: int) -> dict[str, NDArray[np.float32]]:
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> NDArray[np.float32]:
        return (rng.standard_normal((rows, columns)) * scale / columns**0.5).astype(np.float32)

    embed_VD, head_VD = _bigram_factors(_successor_scores(tokenizer, answers), rng)
    ones = np.ones(_HIDDEN_SIZE, np.float32)
    tensors = {
        "model.embed_tokens.weight": embed_VD,
        "model.norm.weight": ones,
        "lm_head.weight": head_VD,
    }
    kv_size = _NUM_KV_HEADS * _HEAD_SIZE
    for layer in range(_NUM_LAYERS):
        block = {
            "input_layernorm": ones,
            "post_attention_layernorm": ones,
            "self_attn.q_proj": matrix(_HIDDEN_SIZE, _HIDDEN_SIZE),
            "self_attn.k_proj": matrix(kv_size, _HIDDEN_SIZE),
            "self_attn.v_proj": matrix(kv_size, _HIDDEN_SIZE),
            "self_attn.o_proj": matrix(_HIDDEN_SIZE, _HIDDEN_SIZE, _BLOCK_SCALE),
            "mlp.gate_proj": matrix(_INNER_SIZE, _HIDDEN_SIZE),
            "mlp.up_proj": matrix(_INNER_SIZE, _HIDDEN_SIZE),
            "mlp.down_proj": matrix(_HIDDEN_SIZE, _INNER_SIZE, _BLOCK_SCALE),
        }
        tensors |= {f"model.layers.{layer}.{name}.weight": value for name, value in block.items()}
    return tensors


def _successor_scores(tokenizer: Tokenizer, answers: list[str]) -> NDArray[np.float64]:
    """[V, V]: log of how often token n follows token t within answers, 0 for never."""
    counts = np.zeros((tokenizer.get_vocab_size(),) * 2)
    for encoding in tokenizer.encode_batch([f"\n{answer}{TURN_END}" for answer in answers]):
        np.add.at(counts, (encoding.ids[:-1], encoding.ids[1:]), 1)
    counts[counts.sum(1) == 0] = counts[tokenizer.token_to_id("Ċ")]  # as at the start of an answer
    shares = counts / counts.sum(1, keepdims=True)
    return np.log(np.maximum(shares, np.exp(_LOG_NEVER))) - _LOG_NEVER


def _bigram_factors(
    scores_VV: NDArray[np.float64], rng: np.random.Generator
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Embedding and head whose product is `scores_VV`.

    Tokens with the same successors share one dimension of the embedding, which the head reads. The
    dimensions left over tell tokens apart for the blocks; the head does not see them. All rows have
    mean square 1, so that the norm before the head changes nothing.
    """
    rows_CV, class_of_V = np.unique(scores_VV, axis=0, return_inverse=True)
    num_classes, num_free = len(rows_CV), _HIDDEN_SIZE - len(rows_CV)
    assert num_free > 0, num_classes
    own = rng.standard_normal((len(scores_VV), num_free))
    own *= np.sqrt(_HIDDEN_SIZE / 2 / np.square(own).sum(1, keepdims=True))
    shared = np.sqrt(_HIDDEN_SIZE / 2)
    embed_VD = np.hstack([np.eye(num_classes)[class_of_V] * shared, own])
    head_VD = np.hstack([rows_CV.T / shared, np.zeros_like(own)])
    return embed_VD.astype(np.float32, "C"), head_VD.astype(np.float32, "C")


def _write_json(path: Path, fields: dict[str, Any]) -> None:
    path.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
