"""Model shapes to run with random weights, as HF configurations, and known figures."""

from typing import Any

LLAMA_3_1_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}

LLAMA_3_3_70B = LLAMA_3_1_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}

SHAPES = {"llama-3.1-8b": LLAMA_3_1_8B, "llama-3.3-70b": LLAMA_3_3_70B}

# One H200, 1024 in / 1024 out. Floor: weights and cache at 4.52 TB/s read bandwidth, matrix
# products at the measured peak. vLLM 0.22.0 with its defaults, measured on the same kind of GPU.
KNOWN = {
    "llama-3.1-8b": {
        "tpot1_ms": {"floor": 3.36, "vllm": 4.89},
        "c32_tok_s": {"floor": 5940, "vllm": 4251},
        "c256_tok_s": {"floor": 11790, "vllm": 9589},
        "start_s": {"floor": None, "vllm": 56},
    }
}
