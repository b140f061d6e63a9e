"""The scheduler's side of a group of layers."""

from penstock.config.run import RunConfig
from penstock.core.kv.groups import CacheGroup, FullGroup, StateGroup, WindowGroup
from penstock.runtime.cache_groups import LayerGroup


def cache_group(group: LayerGroup, num_blocks: int, config: RunConfig) -> CacheGroup:
    block_size, reuse = config.tokens_per_block, config.block_reuse
    if group.has_states:
        rows, interval = config.max_batch_size, config.state_interval
        return StateGroup(num_blocks, block_size, interval, rows, reuse)
    if group.window is None:
        return FullGroup(num_blocks, block_size, reuse, config.partial_reuse)
    return WindowGroup(num_blocks, block_size, group.window, reuse, config.partial_reuse)
