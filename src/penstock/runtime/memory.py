"""The byte plan of one rank: weights, activations, graphs, and what is left for the cache."""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.config.run import RunConfig
from penstock.errors import ConfigError
from penstock.runtime.cache_groups import LayerGroup
from penstock.types.cache_spec import RESERVED_BLOCKS

_GIB = 2**30
_GRAPH_BASE_BYTES = 400 * 2**20  # workspaces and graph nodes; what was taken is logged


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    weights: int
    activations: int  # peak of a step of max_num_tokens
    graphs: int  # reserved for CUDA graphs
    block: int  # one cache block of the first group, all its layers
    num_blocks: int  # of the first group
    further_blocks: tuple[int, ...] = ()  # of the others
    further: int = 0  # bytes of all their blocks

    @property
    def cache(self) -> int:
        return self.num_blocks * self.block + self.further

    def as_dict(self) -> dict[str, int]:
        return {
            "weights_bytes": self.weights,
            "activations_bytes": self.activations,
            "graphs_bytes": self.graphs,
            "kv_cache_bytes": self.cache,
            "kv_block_bytes": self.block,
        }


def make_plan(
    config: RunConfig,
    *,
    weights: int,
    activations: int,
    free: int,
    groups: Sequence[LayerGroup],
) -> MemoryPlan:
    """`free` bytes are left on the device beside the weights, activations not yet taken off."""
    block = groups[0].block_bytes(config.tokens_per_block)
    further_blocks = tuple(group.fixed_blocks(config) for group in groups[1:])
    further = sum(
        num * group.block_bytes(config.tokens_per_block)
        for group, num in zip(groups[1:], further_blocks, strict=True)
    )
    graphs = 0
    if config.device == "cpu":
        budget = config.kv_cpu_bytes
    else:
        if config.graph_batch_sizes:
            share = config.graph_batch_sizes[-1] / config.max_num_tokens
            graphs = _GRAPH_BASE_BYTES + int(activations * min(1.0, share))
        budget = int(config.kv_memory_fraction * (free - activations - graphs))
    num_blocks = max(0, budget - further) // block
    if config.kv_max_tokens is not None:
        wanted = -(-config.kv_max_tokens // config.tokens_per_block) + RESERVED_BLOCKS
        num_blocks = min(num_blocks, wanted) if config.device != "cpu" else wanted
    if num_blocks < RESERVED_BLOCKS + 1:
        raise ConfigError(
            f"no memory for the KV cache: {free / _GIB:.2f} GiB free after weights, "
            f"{activations / _GIB:.2f} GiB needed for activations, {graphs / _GIB:.2f} GiB for "
            "graphs; lower max_num_tokens or max_batch_size, use more GPUs (tensor_parallel_size), "
            "or free memory on the device"
        )
    return MemoryPlan(
        weights=weights,
        activations=activations,
        graphs=graphs,
        block=block,
        num_blocks=num_blocks,
        further_blocks=further_blocks,
        further=further,
    )


def longest_sequence(config: RunConfig, num_blocks: int) -> int:
    """The most tokens of one sequence: max_seq_len, or less when the pool cannot hold that."""
    return min(config.max_seq_len, (num_blocks - RESERVED_BLOCKS) * config.tokens_per_block)
