"""The names of `tensorrt_llm.llmapi` that have a counterpart."""

from penstock import LLM, GuidedDecodingParams, LoRARequest, SamplingParams
from penstock.config.graphs import CudaGraphConfig
from penstock.config.kv_cache import KvCacheConfig
from penstock.config.lora import LoraConfig
from penstock.config.moe import MoeConfig
from penstock.config.speculative import SpeculativeConfig as NGramDecodingConfig

__all__ = [
    "LLM",
    "CudaGraphConfig",
    "GuidedDecodingParams",
    "KvCacheConfig",
    "LoRARequest",
    "LoraConfig",
    "MoeConfig",
    "NGramDecodingConfig",
    "SamplingParams",
]
