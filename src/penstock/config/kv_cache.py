"""`kv_cache_config`: how large the cache of keys and values is and what is kept in it."""

from typing import Literal

from pydantic import field_validator, model_validator

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
    host_cache_size: int | None = setting(
        None,
        "Bytes of host memory, on each rank, for the cache of requests that had to leave because "
        "the cache was full; without room there they compute it again. Taken when first needed. "
        "null: on a GPU an eighth of the host's memory, shared by all ranks; 0: none.",
        ge=0,
        le=2**44,
    )
    tokens_per_block: int = setting(
        32,
        "Tokens in one cache block, a power of two. Small ones waste less of the last one.",
        ge=8,
        le=256,
    )
    dtype: Literal["auto", "fp8", "nvfp4", "int8", "bfloat16", "float16", "float32"] = setting(
        "auto",
        "Number format of the cache. fp8: half the memory, with the scales of the checkpoint or 1. "
        "nvfp4: a little more than a quarter, 4-bit floats with a scale per 16 channels; not for "
        "latents. int8: a little more than half, with scales of each token and head; not for "
        "latents. auto: fp8, nvfp4 or int8 where the checkpoint is made for it, else the one the "
        "model computes in. Any other must be that one.",
    )

    mamba_state_cache_interval: int = setting(
        2048,
        "Of models with recurrent layers: tokens between two snapshots of a prompt's state, from "
        "which another prompt with the same beginning goes on; a multiple of tokens_per_block. "
        "Further snapshots are taken near the prompt's end. A chunk of a prompt is never longer.",
        ge=8,
        le=2**20,
    )
    mamba_state_cache_fraction: float = setting(
        0.1,
        "Of models with recurrent layers: share of the cache's memory that state snapshots may "
        "fill, however many sequences run; the oldest one goes first. The states of "
        "max_batch_size sequences are beside it. 0: no prefix is reused.",
        ge=0.0,
        le=0.5,
    )

    @field_validator("tokens_per_block")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        if value & (value - 1):
            raise ValueError("it must be a power of two (8, 16, 32, 64, 128 or 256)")
        return value

    @model_validator(mode="after")
    def _interval_of_blocks(self) -> "KvCacheConfig":
        if self.mamba_state_cache_interval % self.tokens_per_block:
            raise ValueError(
                f"mamba_state_cache_interval is {self.mamba_state_cache_interval}, which is no "
                f"multiple of tokens_per_block ({self.tokens_per_block})"
            )
        return self
