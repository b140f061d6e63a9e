"""Model shapes to run with random weights, as HF configurations, and the rows of the dense table:
how each is run, what it shall reach, and what a peer reaches on the same GPU."""

import contextlib
import json
import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
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

TINY = LLAMA_3_1_8B | {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}

SHAPES = {"llama-3.1-8b": LLAMA_3_1_8B, "llama-3.3-70b": LLAMA_3_3_70B, "tiny": TINY}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table. Figures are named as in docs/performance.md."""

    shape: str
    is_fp8: bool = False  # matrices of the layers, one scale each; the head stays bf16
    has_fp8_cache: bool = False
    settings: dict[str, Any] = field(default_factory=dict)  # beside the usual ones
    max_running: int | None = None  # sequences of 2048 tokens that the cache of an H200 holds
    goal: dict[str, float] = field(default_factory=dict)
    peer: dict[str, float] = field(default_factory=dict)

    @property
    def config(self) -> dict[str, Any]:
        return SHAPES[self.shape]

    def engine_settings(self, max_seq_len: int, max_batch_size: int) -> dict[str, Any]:
        """As LLM(...) and the server's YAML file take them."""
        settings: dict[str, Any] = {
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "max_seq_len": max_seq_len,
            "max_batch_size": max_batch_size,
            **self.settings,
        }
        largest = settings["max_batch_size"]
        settings["cuda_graph_config"] = {"max_batch_size": largest, "enable_padding": True}
        settings["kv_cache_config"] = {"enable_block_reuse": False}
        if self.is_fp8:
            settings["model_kwargs"] = {"quantization_config": {"quant_algo": "FP8"}}
        if self.has_fp8_cache:
            settings["kv_cache_config"]["dtype"] = "fp8"
        return settings


# One H200, 1024 in / 1024 out. The peer is vLLM 0.22.0 with FlashAttention 3 and its defaults,
# measured on the same GPU; of the two rows with an fp8 cache, c256 is what TensorRT-LLM publishes,
# and the other figures of the 70B are vLLM's with a bf16 cache.
ROWS = {
    "8b-bf16": Row(
        shape="llama-3.1-8b",
        goal={"tpot1_ms": 3.8, "c32_tok_s": 5300, "c256_tok_s": 10800, "start_s": 15},
        peer={"tpot1_ms": 4.89, "c32_tok_s": 4251, "c256_tok_s": 9589, "start_s": 56},
    ),
    "8b-fp8": Row(
        shape="llama-3.1-8b",
        is_fp8=True,
        goal={"tpot1_ms": 2.15, "c32_tok_s": 7600, "c256_tok_s": 13400, "start_s": 15},
        peer={"tpot1_ms": 3.35, "c32_tok_s": 5164, "c256_tok_s": 11492, "start_s": 74},
    ),
    "8b-fp8-kv8": Row(
        shape="llama-3.1-8b",
        is_fp8=True,
        has_fp8_cache=True,
        goal={"tpot1_ms": 2.15, "c32_tok_s": 9000, "c256_tok_s": 18500},
        peer={"c256_tok_s": 17744},
    ),
    "70b-fp8-kv8": Row(
        shape="llama-3.3-70b",
        is_fp8=True,
        has_fp8_cache=True,
        settings={"max_batch_size": 1024, "max_num_tokens": 2048},
        max_running=201,
        goal={"tpot1_ms": 17.2, "c32_tok_s": 1380, "c256_tok_s": 2920, "start_s": 25},
        peer={"tpot1_ms": 19.6, "c32_tok_s": 965, "c256_tok_s": 2909, "start_s": 131},
    ),
    "tiny": Row(shape="tiny"),  # to try the commands, not to measure
}
TABLE = ("8b-bf16", "8b-fp8", "8b-fp8-kv8", "70b-fp8-kv8")


@contextlib.contextmanager
def model_folder(row: Row) -> Iterator[str]:
    """A folder with the row's config.json, for as long as it is needed."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(row.config))
        yield folder


def prompts(count: int, num_ids: int, vocab_size: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(num_ids)] for _ in range(count)]
