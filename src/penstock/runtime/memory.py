"""The byte plan of one rank: weights, activations, graphs, and what is left for the cache.

On a GPU the activations are measured; on a CPU, where the largest step takes seconds, they follow
from the sizes of the model and of the step.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from penstock.config.run import RunConfig
from penstock.errors import ConfigError
from penstock.runtime.cache_groups import LayerGroup
from penstock.types.cache_spec import (
    DTYPE_BYTES,
    RESERVED_BLOCKS,
    CacheSize,
    block_bytes,
    state_blocks_needed,
)
from penstock.types.model_spec import ModelSpec

_GIB = 2**30
_SCORED_AT_ONCE = 256  # positions whose prompt log-probabilities are computed together
_LIBRARY_BYTES = 32 * 2**20  # what native ops, torch and the C library keep, whatever the step
_GRAPH_BASE_BYTES = 400 * 2**20  # workspaces and graph nodes; what was taken is logged
_MIXED_LAYER_BYTES = 320 << 10  # nodes of one layer in one graph of a mix: 10 MiB for 32 layers


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    weights: int
    activations: int  # peak of a step of max_num_tokens
    process: int = 0  # on a CPU: what the process had before there was a model
    graphs: int  # reserved for CUDA graphs
    blocks: tuple[int, ...]  # one cache block of each group, all its layers
    size: CacheSize  # as far as this rank can tell
    states: int | None = None  # number of the group whose blocks are states; None: there is none

    def cache_bytes(self, size: CacheSize) -> int:
        return _dot(size.num_blocks, self.blocks)

    def as_dict(self, size: CacheSize) -> dict[str, int]:
        """With a cache of the size that all ranks agreed on."""
        planned = {
            "weights_bytes": self.weights,
            "activations_bytes": self.activations,
            "graphs_bytes": self.graphs,
            "kv_cache_bytes": self.cache_bytes(size),
            "kv_block_bytes": self.blocks[0],
        }
        if self.process:
            planned["process_bytes"] = self.process
        if self.states is not None:
            state = self.blocks[self.states]
            planned["states_bytes"] = size.num_blocks[self.states] * state
            planned["state_bytes"] = state
        return planned

    def states_in_words(self, size: CacheSize) -> tuple[str, str]:
        """How many states there is room for, and what for."""
        assert self.states is not None
        num_slots = size.num_blocks[self.states]
        num_snapshots = num_slots - state_blocks_needed(size.max_rows)
        snapshots = f"{num_snapshots} snapshots for prefix reuse"
        return str(num_slots), f"{size.max_rows} sequences, {snapshots}, one for padding"


def make_plan(
    config: RunConfig,
    *,
    weights: int,
    activations: int,
    free: int,
    groups: Sequence[LayerGroup],
    process: int = 0,
) -> MemoryPlan:
    """`free` bytes are left on the device beside the weights, activations not yet taken off."""
    blocks = tuple(group.block_bytes(config.tokens_per_block) for group in groups)
    states = next((number for number, group in enumerate(groups) if group.has_states), None)
    asked = None
    if config.kv_max_tokens is not None:
        asked = -(-config.kv_max_tokens // config.tokens_per_block) + RESERVED_BLOCKS
    activations += _gathered_bytes(config, groups)
    graphs, left = 0, max(0, free - activations)
    if config.device == "cpu":
        for_states = min(config.state_cpu_bytes, left // 2)
        budget = min(config.kv_cpu_bytes + for_states, left)
    else:
        if config.graph_batch_sizes:
            graphs = _graph_bytes(config, activations, sum(len(group.layers) for group in groups))
        budget = int(config.kv_memory_fraction * (free - activations - graphs))
        # Keys and values keep half of it, or all they may have.
        for_states = budget - min(budget // 2, budget if asked is None else asked * blocks[0])
    max_rows, num_states = config.max_batch_size, 0
    if states is not None:
        max_rows, num_states = _states(config, budget, for_states, blocks[states])
    further = tuple(
        num_states if group.has_states else group.window_blocks(config) for group in groups[1:]
    )
    taken = _dot(further, blocks[1:])
    num_blocks = max(0, budget - taken) // blocks[0]
    if asked is not None and config.device == "cpu":
        if asked * blocks[0] + taken > left:
            raise ConfigError(
                f"kv_cache_config.max_tokens is {config.kv_max_tokens}, which takes "
                f"{asked * blocks[0] / _GIB:.2f} GiB of cache; of {free / _GIB:.2f} GiB free after "
                f"weights, {activations / _GIB:.2f} GiB are needed for activations; lower it, or "
                "max_num_tokens"
            )
        num_blocks = asked  # windows and states come on top
    elif asked is not None:
        num_blocks = min(num_blocks, asked)
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
        size=CacheSize(
            num_blocks=(num_blocks, *further),
            max_rows=max_rows,
            num_host_blocks=_num_host_blocks(config, groups, blocks, num_blocks, max_rows),
        ),
        states=states,
        process=process,
    )


def _gathered_bytes(config: RunConfig, groups: Sequence[LayerGroup]) -> int:
    """With context parallelism: keys and values of a layer that come from all ranks for prompts,
    with what this rank sends. As many as a sequence may have, and twice those of a step."""
    if (size := config.mesh.cp) == 1:
        return 0
    num_cached = -(-config.max_seq_len // config.tokens_per_block)
    num_new = -(-config.max_num_tokens // config.tokens_per_block)
    part = max(block_bytes(part.spec, config.tokens_per_block) for part in groups[0].parts)
    return part * ((size + 1) * num_cached + 2 * size * num_new)


def _graph_bytes(config: RunConfig, activations: int, num_layers: int) -> int:
    """Graphs share the memory of the largest; the nodes of mixes come on top, those that are
    captured when idle included, and with drafts those of decodes."""
    largest = max(config.graph_batch_sizes[-1], *config.graph_token_sizes, 0)
    share = min(1.0, largest / config.max_num_tokens)
    largest_mix = max(map(sum, config.graph_mixes), default=0)  # may be padded beyond a step
    num_mixes = len(config.graph_mixes) + len(config.graph_mixes_when_idle)
    if config.drafting is not None:  # plain steps have graphs of their own
        num_mixes += len(config.graph_batch_sizes)
    if config.lora is not None:
        num_mixes *= 2  # steps without adapters have their own
    activations = int(activations * max(share, largest_mix / config.max_num_tokens))
    return _GRAPH_BASE_BYTES + activations + num_mixes * num_layers * _MIXED_LAYER_BYTES


def _num_host_blocks(
    config: RunConfig, groups: Sequence[LayerGroup], blocks: tuple[int, ...], num: int, rows: int
) -> tuple[int, ...]:
    """Host memory is divided as `rows` sequences would that fill all `num` blocks of the first
    group; of the others there is enough for one sequence at least."""
    further = [group.blocks_per_sequence(config.tokens_per_block) for group in groups[1:]]
    full = num * blocks[0] + rows * _dot(further, blocks[1:])
    num_sequences = max(1, int(rows * config.host_cache_bytes / full))
    further = [num_sequences * each for each in further]
    left = config.host_cache_bytes - _dot(further, blocks[1:])
    return (left // blocks[0], *further) if left >= blocks[0] else ()


def _dot(nums: Iterable[int], sizes: Iterable[int]) -> int:
    return sum(num * size for num, size in zip(nums, sizes, strict=True))


def cpu_activations(config: RunConfig, spec: ModelSpec) -> int:
    """About the peak of the largest step on a CPU: what lies beside the residual stream where that
    is most, in attention, in an MLP, or where logits become tokens."""
    size = DTYPE_BYTES[config.dtype]
    tokens, longest = config.max_num_tokens, config.max_seq_len
    queries = min(tokens, longest)
    head_size, value_size = spec.head_size, spec.head_size
    if spec.latent is not None:
        head_size, value_size = (
            spec.latent.nope_size + spec.latent.rope_size,
            spec.latent.value_size,
        )
    per_token = spec.num_heads * (head_size + value_size) + spec.num_kv_heads * 2 * head_size
    keys = 2 * spec.num_kv_heads * longest * head_size
    attention = size * (tokens * per_token + keys) + queries * longest * (1 + 4)  # masks
    inner = 3 * spec.intermediate_size
    if spec.moe is not None:
        routed = spec.moe.num_active * (3 * spec.moe.intermediate_size + spec.hidden_size)
        inner = max(inner, routed + 3 * spec.moe.shared_intermediate_size)
    mlp = size * tokens * inner
    # Of each logit: itself, an edited copy, both once more while the largest are looked for, sorted
    # values with their places; of scored prompts the same in fewer steps.
    rows = config.max_batch_size
    logits = spec.vocab_size * max(rows * (size + 32), _SCORED_AT_ONCE * (size + 16))
    seen = rows * spec.vocab_size * 5  # tokens that penalties count
    stream = 4 * size * tokens * spec.hidden_size
    # Of an MLP a rank has a shard, which the tokens of all data-parallel ranks go through.
    gathered = 2 * (config.mesh.dp - 1) * size * tokens * spec.hidden_size
    peak = (stream + max(attention, mlp, logits)) // config.mesh.tp + gathered + seen
    return peak + peak // 8 + _LIBRARY_BYTES  # an eighth lies between what is in use


def _states(config: RunConfig, budget: int, for_states: int, state: int) -> tuple[int, int]:
    """(sequences whose state fits, blocks of them and of snapshots), a state having `state` bytes.

    Snapshots have a share of the whole `budget`, but no more than half of what states may take.
    """
    num_fit = for_states // state - RESERVED_BLOCKS
    num_snapshots = 0
    if config.block_reuse:
        num_snapshots = min(int(config.state_snapshot_share * budget) // state, num_fit // 2)
    max_rows = min(config.max_batch_size, num_fit - num_snapshots)
    return max_rows, state_blocks_needed(max_rows) + num_snapshots


def fitted(config: RunConfig, size: CacheSize) -> RunConfig:
    """The same run with no more sequences at once than the cache has room for."""
    if size.max_rows >= config.max_batch_size:
        return config
    most = size.max_rows
    most_tokens = most * (1 + config.max_drafts)
    graph_sizes = {min(num, most_tokens) for num in config.graph_batch_sizes}
    return replace(
        config,
        max_batch_size=most,
        graph_batch_sizes=tuple(sorted(graph_sizes)),
        graph_mixes=fitted_mixes(config.graph_mixes, most),
        graph_mixes_when_idle=tuple(m for m in config.graph_mixes_when_idle if m[0] <= most),
    )


def fitted_mixes(mixes: Sequence[tuple[int, int]], max_rows: int) -> tuple[tuple[int, int], ...]:
    """In the same order, with no more decodes than there are rows."""
    return tuple(dict.fromkeys((min(decodes, max_rows), tokens) for decodes, tokens in mixes))


def longest_sequence(config: RunConfig, size: CacheSize) -> int:
    """The most tokens of one sequence: max_seq_len, or less when the pool cannot hold that."""
    most = (size.num_blocks[0] - RESERVED_BLOCKS) * config.tokens_per_block
    return min(config.max_seq_len, most)
