"""`attention_dp_config` and `cp_config`; sizes of parallelism that follow from, or rule out, each
other."""

from collections.abc import Mapping
from typing import Any, Literal, TypeGuard

from penstock.config.base import StrictModel, setting
from penstock.errors import ConfigError

_MISSING = {
    "moe_cluster_parallel_size": "experts are on the ranks that moe_expert_parallel_size gives "
    "them; there are no clusters",
}


class AttentionDpConfig(StrictModel):
    enable_balance: bool = setting(
        False,
        "Hold prompts back until every rank can begin one, so that no rank waits in a step for the "
        "prompts of another.",
    )
    batching_wait_iters: int = setting(
        10,
        "With enable_balance, once every rank could begin a prompt and has decodes to go on with: "
        "steps to wait for more prompts.",
        ge=0,
        le=100_000,
    )
    timeout_iters: int = setting(
        50,
        "With enable_balance: the most steps for which a prompt waits until every rank could begin "
        "one. A rank without decodes waits for nothing.",
        ge=0,
        le=100_000,
    )


class CpConfig(StrictModel):
    cp_type: Literal["HELIX", "RING"] = setting(
        "HELIX",
        "Both are exact, and mean the same here: keys and values are gathered for prompts, and "
        "decodes attend to the parts of the cache where they are.",
    )
    tokens_per_block: int | None = setting(
        None,
        "Tokens of a cache block on each rank. It has to be kv_cache_config.tokens_per_block, "
        "which says the same.",
        ge=8,
        le=256,
    )


def with_implied_sizes(values: Mapping[str, Any]) -> dict[str, Any]:
    """The number of ranks, where only those that share experts are given."""
    sizes = [values.get(f"moe_{kind}_parallel_size") for kind in ("expert", "tensor")]
    given = [size for size in sizes if _is_size(size)]
    if values.get("tensor_parallel_size") is not None or sizes[0] not in given:
        return dict(values)
    implied = given[0] * given[1] if len(given) > 1 else given[0]
    cp_size = values.get("context_parallel_size")
    implied = max(1, implied // (cp_size if _is_size(cp_size) else 1))
    return {**values, "tensor_parallel_size": implied}


def with_launcher(values: Mapping[str, Any]) -> dict[str, Any]:
    """`launcher`, where TensorRT-LLM's name of it says that it is Ray."""
    if str(values.get("orchestrator_type")).lower() != "ray":
        return dict(values)
    if (other := values.get("launcher", "ray")) not in ("ray", "auto"):
        raise ConfigError(
            f"orchestrator_type is ray and launcher is {other}; leave one of the two out"
        )
    return {**values, "launcher": "ray"}


def check_sizes(values: Mapping[str, Any]) -> None:
    """Refuse what is not there, with the number of ranks that was asked for."""
    num_ranks = values.get("tensor_parallel_size")
    num_ranks = num_ranks if _is_size(num_ranks) else 1
    for name, reason in _MISSING.items():
        size = values.get(name)
        if not _is_size(size) or size == 1:
            continue
        raise ConfigError(
            f"{name} is {size}, and tensor_parallel_size {num_ranks} x {size} = {num_ranks * size} "
            f"ranks: {reason}; leave {name} out, and set tensor_parallel_size to the number of "
            "GPUs, or data_parallel_size to that of replicas"
        )


def _is_size(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
