"""The byte plan of one rank: weights, activations, graphs, and what is left for the cache."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.config.run import RunConfig
from penstock.core.kv.groups import StateGroup
from penstock.errors import ConfigError
from penstock.runtime.cache_groups import LayerGroup
from penstock.types.cache_spec import RESERVED_BLOCKS, CacheSize

_GIB = 2**30
_GRAPH_BASE_BYTES = 400 * 2**20  # workspaces and graph nodes; what was taken is logged


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    weights: int
    activations: int  # peak of a step of max_num_tokens
    graphs: int  # reserved for CUDA graphs
    blocks: tuple[int, ...]  # one cache block of each group, all its layers
    size: CacheSize  # as far as this rank can tell
    states: int | None = None  # number of the group whose blocks are states; None: there is none

    def cache_bytes(self, size: CacheSize) -> int:
        return sum(num * block for num, block in zip(size.num_blocks, self.blocks, strict=True))

    def as_dict(self, size: CacheSize) -> dict[str, int]:
        """With a cache of the size that all ranks agreed on."""
        planned = {
            "weights_bytes": self.weights,
            "activations_bytes": self.activations,
            "graphs_bytes": self.graphs,
            "kv_cache_bytes": self.cache_bytes(size),
            "kv_block_bytes": self.blocks[0],
        }
        if self.states is not None:
            state = self.blocks[self.states]
            planned["states_bytes"] = size.num_blocks[self.states] * state
            planned["state_bytes"] = state
        return planned

    def states_in_words(self, size: CacheSize) -> tuple[str, str]:
        """How many states there is room for, and what for."""
        assert self.states is not None
        num_slots = size.num_blocks[self.states]
        num_copies = num_slots - StateGroup.blocks_needed(size.max_rows)
        reason = f"{size.max_rows} sequences, {num_copies} copies for prefix reuse, one for padding"
        return str(num_slots), reason


def make_plan(
    config: RunConfig,
    *,
    weights: int,
    activations: int,
    free: int,
    groups: Sequence[LayerGroup],
) -> MemoryPlan:
    """`free` bytes are left on the device beside the weights, activations not yet taken off."""
    blocks = tuple(group.block_bytes(config.tokens_per_block) for group in groups)
    states = next((number for number, group in enumerate(groups) if group.has_states), None)
    asked = None
    if config.kv_max_tokens is not None:
        asked = -(-config.kv_max_tokens // config.tokens_per_block) + RESERVED_BLOCKS
    graphs = 0
    if config.device == "cpu":
        for_states = config.state_cpu_bytes
        budget = config.kv_cpu_bytes + for_states
    else:
        if config.graph_batch_sizes:
            largest = max(config.graph_batch_sizes[-1], *config.graph_token_sizes, 0)
            share = largest / config.max_num_tokens
            graphs = _GRAPH_BASE_BYTES + int(activations * min(1.0, share))
        budget = int(config.kv_memory_fraction * (free - activations - graphs))
        # Keys and values keep half of it, or all they may have.
        for_states = budget - min(budget // 2, budget if asked is None else asked * blocks[0])
    max_rows, num_states = config.max_batch_size, 0
    if states is not None:
        max_rows, num_states = _states(config, budget, for_states, blocks[states])
    further = tuple(
        num_states if group.has_states else group.window_blocks(config) for group in groups[1:]
    )
    taken = sum(num * block for num, block in zip(further, blocks[1:], strict=True))
    num_blocks = max(0, budget - taken) // blocks[0]
    if asked is not None:
        num_blocks = min(num_blocks, asked) if config.device != "cpu" else asked
    if num_blocks < RESERVED_BLOCKS + 1 or max_rows < 1:
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
        blocks=blocks,
        size=CacheSize(num_blocks=(num_blocks, *further), max_rows=max_rows),
        states=states,
    )


def _states(config: RunConfig, budget: int, for_states: int, state: int) -> tuple[int, int]:
    """(sequences whose state fits, blocks of them and of copies) where a state takes so many bytes.

    Copies have a share of the whole `budget`, but no more than half of what states may take.
    """
    num_fit = for_states // state - RESERVED_BLOCKS
    num_copies = 0
    if config.block_reuse:
        num_copies = min(int(config.state_copy_share * budget) // state, num_fit // 2)
    max_rows = min(config.max_batch_size, num_fit - num_copies)
    return max_rows, StateGroup.blocks_needed(max_rows) + num_copies


def fitted(config: RunConfig, size: CacheSize) -> RunConfig:
    """The same run with no more sequences at once than the cache has room for."""
    if size.max_rows >= config.max_batch_size:
        return config
    graph_sizes = {min(num, size.max_rows) for num in config.graph_batch_sizes}
    return replace(
        config, max_batch_size=size.max_rows, graph_batch_sizes=tuple(sorted(graph_sizes))
    )


def longest_sequence(config: RunConfig, size: CacheSize) -> int:
    """The most tokens of one sequence: max_seq_len, or less when the pool cannot hold that."""
    most = (size.num_blocks[0] - RESERVED_BLOCKS) * config.tokens_per_block
    return min(config.max_seq_len, most)
