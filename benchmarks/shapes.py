"""Model shapes to run with random weights, as HF configurations, and the rows of the table: how
each is run, what it shall reach, and what a peer reaches on the same GPU."""

import contextlib
import json
import random
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.bench.roofline import EXPERT_COUNTS

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

_QWEN: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}

QWEN1_5_MOE_A2_7B = _QWEN | {
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
    "max_position_embeddings": 8192,
    "rope_theta": 1000000.0,
    "eos_token_id": 151643,
}

QWEN3_30B_A3B = _QWEN | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
}

_BLOCKS_OF_128 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}

QWEN3_NEXT_80B = _QWEN | {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "intermediate_size": 5120,
    "num_hidden_layers": 48,
    "full_attention_interval": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "max_position_embeddings": 262144,
    "rope_theta": 10000000,
    # The published checkpoint is bf16, twice as large as this GPU's memory allows.
    "quantization_config": _BLOCKS_OF_128
    | {
        "modules_to_not_convert": [
            "lm_head",
            "linear_attn.in_proj_ba",
            "mlp.gate",
            "mlp.shared_expert_gate",
        ]
    },
}

DEEPSEEK_R1: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "quantization_config": _BLOCKS_OF_128,
}

GPT_OSS_20B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "attention_bias": True,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "swiglu_limit": 7.0,
    "max_position_embeddings": 131072,
    "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 200002,
    "pad_token_id": 199999,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    },
}

GPT_OSS_120B = GPT_OSS_20B | {
    "num_hidden_layers": 36,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "num_local_experts": 128,
}

TINY = LLAMA_3_1_8B | {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
_TINY_SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 8192,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_TINY_EXPERTS = {"num_hidden_layers": 2, "num_experts": 16, "moe_intermediate_size": 128}

SHAPES = {
    "llama-3.1-8b": LLAMA_3_1_8B,
    "llama-3.3-70b": LLAMA_3_3_70B,
    "qwen1.5-moe-a2.7b": QWEN1_5_MOE_A2_7B,
    "qwen3-30b-a3b": QWEN3_30B_A3B,
    "qwen3-next-80b": QWEN3_NEXT_80B,
    "deepseek-r1": DEEPSEEK_R1,
    "gpt-oss-20b": GPT_OSS_20B,
    "gpt-oss-120b": GPT_OSS_120B,
    # The same kinds of layers, for trying things out.
    "tiny": TINY,
    "tiny-qwen2-moe": QWEN1_5_MOE_A2_7B
    | _TINY_SIZES
    | _TINY_EXPERTS
    | {"shared_expert_intermediate_size": 256},
    "tiny-qwen3-moe": QWEN3_30B_A3B | _TINY_SIZES | _TINY_EXPERTS | {"head_dim": 32},
    "tiny-qwen3-next": QWEN3_NEXT_80B
    | _TINY_SIZES
    | _TINY_EXPERTS
    | {
        "num_hidden_layers": 4,
        "head_dim": 64,
        "linear_key_head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 32,
        "shared_expert_intermediate_size": 128,
    },
    "tiny-deepseek": DEEPSEEK_R1
    | _TINY_SIZES
    | {
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "q_lora_rank": 128,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "n_routed_experts": 16,
        "moe_intermediate_size": 128,
    },
    "tiny-gpt-oss": GPT_OSS_20B
    | _TINY_SIZES
    | {
        "intermediate_size": 128,
        "head_dim": 32,
        "num_hidden_layers": 4,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_local_experts": 8,
        "pad_token_id": 0,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table. Figures are named as in docs/benchmarks.md."""

    shape: str
    changes: Mapping[str, Any] = field(default_factory=dict)  # of fields of its configuration
    has_fp8_cache: bool = False
    temperature: float = 0.0
    settings: Mapping[str, Any] = field(default_factory=dict)  # beside the usual ones
    concurrency: tuple[int, ...] = (32, 256)
    max_running: int | None = None  # sequences of 2048 tokens that the cache of an H200 holds
    goal: Mapping[str, float] = field(default_factory=dict)
    peer: Mapping[str, float] = field(default_factory=dict)

    @property
    def config(self) -> dict[str, Any]:
        return SHAPES[self.shape] | dict(self.changes)

    @property
    def has_experts(self) -> bool:
        return any(name in self.config for name in EXPERT_COUNTS)

    def engine_settings(self, max_seq_len: int, max_batch_size: int) -> dict[str, Any]:
        """As LLM(...) and the server's YAML file take them."""
        settings: dict[str, Any] = {
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "seed": 0,
            "max_seq_len": max_seq_len,
            "max_batch_size": max_batch_size,
            **self.settings,
        }
        largest = settings["max_batch_size"]
        settings["cuda_graph_config"] = {"max_batch_size": largest, "enable_padding": True}
        settings["kv_cache_config"] = {"enable_block_reuse": False}
        if self.has_fp8_cache:
            settings["kv_cache_config"]["dtype"] = "fp8"
        return settings


_STATIC_FP8 = {"quantization_config": {"quant_algo": "FP8"}}
_NVFP4: dict[str, Any] = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}
_NVFP4_BESIDE_MLA = _NVFP4 | {"exclude_modules": ["*self_attn*", "lm_head"]}

# One H200, 1024 in / 1024 out. The peer is vLLM 0.22.0 with FlashAttention 3 and its defaults,
# measured on the same GPU; of the two rows with an fp8 cache, c256 is what TensorRT-LLM publishes,
# and the other figures of the 70B are vLLM's with a bf16 cache.
#
# Experts: with random weights the likeliest tokens of many sequences soon are the same, and so are
# their experts. Their rows draw every token, from fixed seeds.
ROWS = {
    "8b-bf16": Row(
        shape="llama-3.1-8b",
        goal={
            "tpot1_ms": 3.8,
            "c32_tok_s": 5300,
            "c256_tok_s": 10800,
            "start_s": 15,
            "cold_start_s": 30,
        },
        peer={"tpot1_ms": 4.89, "c32_tok_s": 4251, "c256_tok_s": 9589, "start_s": 56},
    ),
    "8b-fp8": Row(
        shape="llama-3.1-8b",
        changes=_STATIC_FP8,
        goal={
            "tpot1_ms": 2.15,
            "c32_tok_s": 7600,
            "c256_tok_s": 13400,
            "start_s": 15,
            "cold_start_s": 30,
        },
        peer={"tpot1_ms": 3.35, "c32_tok_s": 5164, "c256_tok_s": 11492, "start_s": 74},
    ),
    "8b-fp8-kv8": Row(
        shape="llama-3.1-8b",
        changes=_STATIC_FP8,
        has_fp8_cache=True,
        goal={
            "tpot1_ms": 2.15,
            "c32_tok_s": 9000,
            "c256_tok_s": 18500,
            "start_s": 15,
            "cold_start_s": 30,
        },
        peer={"c256_tok_s": 17744},
    ),
    "70b-fp8-kv8": Row(
        shape="llama-3.3-70b",
        changes=_STATIC_FP8,
        has_fp8_cache=True,
        settings={"max_batch_size": 1024, "max_num_tokens": 2048},
        max_running=201,
        goal={
            "tpot1_ms": 17.2,
            "c32_tok_s": 1380,
            "c256_tok_s": 2920,
            "start_s": 25,
            "cold_start_s": 45,
        },
        peer={"tpot1_ms": 19.6, "c32_tok_s": 965, "c256_tok_s": 2909, "start_s": 131},
    ),
    "70b-nvfp4-kv8": Row(
        shape="llama-3.3-70b",
        changes={"quantization_config": _NVFP4},
        has_fp8_cache=True,
        concurrency=(32,),
    ),
    "70b-awq-kv8": Row(
        shape="llama-3.3-70b",
        changes={"quantization_config": _AWQ},
        has_fp8_cache=True,
        concurrency=(32,),
    ),
    "30b-a3b": Row(
        shape="qwen3-30b-a3b",
        temperature=1.0,
        goal={
            "tpot1_ms": 2.0,
            "c32_tok_s": 2150,
            "c256_tok_s": 9200,
            "start_s": 20,
            "cold_start_s": 45,
        },
        peer={"tpot1_ms": 4.29, "c32_tok_s": 1488, "c256_tok_s": 7600, "start_s": 135},
    ),
    "oss-20b": Row(
        shape="gpt-oss-20b",
        temperature=1.0,
        goal={
            "tpot1_ms": 1.3,
            "c32_tok_s": 6500,
            "c256_tok_s": 22000,
            "start_s": 20,
            "cold_start_s": 45,
        },
        peer={"tpot1_ms": 2.94, "c32_tok_s": 2728, "c256_tok_s": 10007, "start_s": 93},
    ),
    "oss-120b": Row(
        shape="gpt-oss-120b",
        temperature=1.0,
        goal={
            "tpot1_ms": 1.8,
            "c32_tok_s": 2700,
            "c256_tok_s": 10000,
            "start_s": 25,
            "cold_start_s": 50,
        },
        peer={"tpot1_ms": 4.43, "c32_tok_s": 1458, "c256_tok_s": 6860, "start_s": 146},
    ),
    "next-80b-fp8": Row(shape="qwen3-next-80b", temperature=1.0, concurrency=(32,)),
    "r1-13-layers": Row(  # as many as fit: three without experts, ten with
        shape="deepseek-r1",
        changes={"num_hidden_layers": 13},
        temperature=1.0,
        concurrency=(32,),
    ),
    "r1-13-layers-nvfp4": Row(
        shape="deepseek-r1",
        changes={"num_hidden_layers": 13, "quantization_config": _NVFP4_BESIDE_MLA},
        temperature=1.0,
        concurrency=(32,),
    ),
    "qwen1.5-moe": Row(shape="qwen1.5-moe-a2.7b", temperature=1.0, concurrency=(32,)),
    # To try the commands, not to measure.
    "tiny": Row(shape="tiny"),
    "tiny-nvfp4": Row(shape="tiny", changes={"quantization_config": _NVFP4}),
    "tiny-awq": Row(shape="tiny", changes={"quantization_config": _AWQ}),
    "tiny-moe": Row(shape="tiny-qwen3-moe", temperature=1.0),
    "tiny-oss": Row(shape="tiny-gpt-oss", temperature=1.0),
    "tiny-next": Row(shape="tiny-qwen3-next", temperature=1.0),
    "tiny-r1": Row(shape="tiny-deepseek", temperature=1.0),
    "tiny-r1-nvfp4": Row(
        shape="tiny-deepseek",
        changes={"quantization_config": _NVFP4_BESIDE_MLA},
        temperature=1.0,
    ),
}
DENSE = ("8b-bf16", "8b-fp8", "8b-fp8-kv8", "70b-fp8-kv8")
WEIGHT_ONLY = ("70b-nvfp4-kv8", "70b-awq-kv8", "r1-13-layers-nvfp4")
MOE = ("30b-a3b", "oss-20b", "oss-120b", "next-80b-fp8", "r1-13-layers", "qwen1.5-moe")


@contextlib.contextmanager
def model_folder(row: Row) -> Iterator[str]:
    """A folder with the row's config.json, for as long as it is needed."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(row.config))
        yield folder


def prompts(count: int, num_ids: int, vocab_size: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(num_ids)] for _ in range(count)]
