"""What a GGUF file says of its model, in the words of config.json. Needs no torch."""

import math
from typing import Any

import numpy as np

from penstock.errors import ConfigError
from penstock.hub.gguf_file import GgufFile
from penstock.models.fields import Fields

_MODEL_TYPES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen2moe": "qwen2_moe",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
}
_ROPE_FACTORS = "rope_freqs.weight"
_F32 = 0


def config_of(file: GgufFile) -> dict[str, Any]:
    """The fields of config.json that describe this model."""
    head = Fields(file.path, file.metadata, "the head")
    architecture = head.text("general.architecture")
    if architecture not in _MODEL_TYPES:
        raise ConfigError(
            f"'{file.path}': GGUF architecture '{architecture}' is not supported; "
            f"supported are {', '.join(_MODEL_TYPES)}"
        )

    def get(name: str, default: Any = None) -> Any:
        return file.metadata.get(f"{architecture}.{name}", default)

    model_type = _MODEL_TYPES[architecture]
    num_experts = head.count(f"{architecture}.expert_count", 0, least=0)
    if model_type == "llama" and num_experts:
        model_type = "mixtral"

    tokens = head.texts("tokenizer.ggml.tokens") or ()
    hidden_size, num_heads = get("embedding_length"), get("attention.head_count")
    has_bias = "blk.0.attn_q.bias" in file.tensors
    config = {
        "model_type": model_type,
        "vocab_size": get("vocab_size", len(tokens) or None),
        "hidden_size": hidden_size,
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": get("attention.head_count_kv", num_heads),
        "head_dim": get("attention.key_length", get("rope.dimension_count")),
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": has_bias,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _end_ids(head),
        "pad_token_id": file.metadata.get("tokenizer.ggml.padding_token_id"),
        "rope_parameters": _rope(file, head, architecture),
    }
    if num_experts:
        num_layers = head.count(f"{architecture}.block_count", most=1 << 12)
        config |= {"qkv_bias": has_bias} | _experts(file, get, num_layers)
    if (window := get("attention.sliding_window")) is not None:
        if model_type != "llama":
            raise ConfigError(f"'{file.path}': a sliding window of {model_type} is not supported")
        config |= {"model_type": "mistral", "sliding_window": window}
    return config


def whole_config(file: GgufFile, architecture: str) -> dict[str, Any]:
    """A config.json that stands for itself, such that older readers understand it, too: they know
    rope_theta and rope_scaling only."""
    config = config_of(file)
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope.pop("rope_theta")}
    if rope["rope_type"] != "default":
        config["rope_scaling"] = rope
    stated = {name: value for name, value in config.items() if value is not None}
    return {"architectures": [architecture], "torch_dtype": "bfloat16"} | stated


def _experts(file: GgufFile, get: Any, num_layers: int) -> dict[str, Any]:
    """Some widths are stored as numbers, all can be seen on the tensors."""
    layers = range(num_layers)
    sparse = [n for n in layers if f"blk.{n}.ffn_gate_inp.weight" in file.tensors]
    if not sparse:
        raise ConfigError(f"'{file.path}' has {get('expert_count')} experts, but no router")

    def width(part: str) -> int | None:
        tensor = file.tensors.get(f"blk.{sparse[0]}.ffn_down_{part}.weight")
        return tensor.shape[-1] if tensor is not None else None

    is_qwen3 = file.metadata["general.architecture"] == "qwen3moe"
    intermediate_size = get("expert_feed_forward_length", width("exps"))
    return {
        "intermediate_size": get("feed_forward_length", intermediate_size),
        "num_experts": get("expert_count"),
        "num_experts_per_tok": get("expert_used_count"),
        "moe_intermediate_size": intermediate_size,
        "shared_expert_intermediate_size": get("expert_shared_feed_forward_length", width("shexp")),
        "norm_topk_prob": get("expert_weights_norm", is_qwen3),
        "mlp_only_layers": [n for n in layers if n not in sparse],
    }


def _end_ids(head: Fields) -> list[int]:
    """End of text and, where it is another token, end of turn."""
    names = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    found = [head.count(name, least=0) for name in names if head.get(name) is not None]
    return list(dict.fromkeys(found))


def _rope(file: GgufFile, head: Fields, architecture: str) -> dict[str, Any]:
    def get(name: str, default: Any = None) -> Any:
        return head.get(f"{architecture}.{name}", default)

    theta = head.number(f"{architecture}.rope.freq_base", 10000.0, above=1.0)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if _ROPE_FACTORS in file.tensors:
        return rope | _llama3(file, theta)
    kind = get("rope.scaling.type", "none")
    if kind == "none":
        return rope
    original = get("rope.scaling.original_context_length")
    factor = head.number(f"{architecture}.rope.scaling.factor", 1.0)
    rope |= {"rope_type": kind, "factor": factor}
    return rope | ({"original_max_position_embeddings": original} if original else {})


def _llama3(file: GgufFile, theta: float) -> dict[str, Any]:
    """Llama 3's scaling is stored as its effect on each frequency; this finds its parameters."""
    tensor = file.tensors[_ROPE_FACTORS]
    if tensor.type != _F32 or len(tensor.shape) != 1 or not tensor.shape[0]:
        raise ConfigError(f"'{file.path}': {_ROPE_FACTORS} is no list of numbers in fp32")
    stored = file.packed_rows(tensor, 1, 4).view(np.float32)[0]
    factor, low, high, original = float(stored.max()), 1.0, 4.0, 8192
    lengths = 2 * math.pi * theta ** (np.arange(len(stored)) / len(stored))
    smooth = np.clip((original / lengths - low) / (high - low), 0.0, 1.0)
    if not np.allclose(stored, 1 / ((1 - smooth) / factor + smooth), rtol=1e-3):
        raise ConfigError(f"'{file.path}': the rotary factors it stores are not those of Llama 3")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
