"""`kv_cache_config`: how large the cache of keys and values is and what is kept in it."""

from typing import Literal

from pydantic import field_validator

from penstock.config.base import StrictModel, setting


class KvCacheConfig(StrictModel):
    enable_block_reuse: bool = setting(
        True, "Keep the cache of finished prompts and share equal prefixes between requests."
    )
    enable_partial_reuse: bool = setting(
        True, "Also reuse the first tokens of a block whose later tokens differ, by copying it."
    )
    max_tokens: int | None = setting(
        None,
        "Most tokens the cache may hold. null: as many as the memory share allows; "
        "when both limits are given the smaller one counts.",
        ge=1,
        le=2**40,
    )
    free_gpu_memory_fraction: float = setting(
        0.9,
        "Share of the GPU memory left after weights and activations that the cache takes. "
        "Lower it when other programs use the same GPU. Not used on a CPU.",
        gt=0.0,
        le=1.0,
    )
    tokens_per_block: int = setting(
        32,
        "Tokens in one cache block, a power of two. Small ones waste less of the last one.",
        ge=8,
        le=256,
    )
    dtype: Literal["auto", "fp8", "bfloat16", "float16", "float32"] = setting(
        "auto",
        "Number format of the cache. fp8: half the memory, with the scales of the checkpoint or 1. "
        "auto: fp8 where the checkpoint is made for it, else the one the model computes in. "
        "Any other must be that one.",
    )

    @field_validator("tokens_per_block")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        if value & (value - 1):
            raise ValueError("it must be a power of two (8, 16, 32, 64, 128 or 256)")
        return value
