"""Which layers share a cache group, and how many blocks each group has.

The first group takes the memory that is there; the others need a number of blocks that follows from
the settings alone, so every rank finds the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.config.run import RunConfig
from penstock.core.kv.groups import CacheGroup, FullGroup, WindowGroup
from penstock.layers.cached import CachedLayer
from penstock.types.cache_spec import CacheSpec, FullKV

_REUSE_SHARE = 0.5  # more blocks than a window needs, so that prefixes are found for a while


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    spec: CacheSpec
    layers: tuple[CachedLayer, ...]

    @property
    def window(self) -> int | None:
        return self.spec.window if isinstance(self.spec, FullKV) else None

    def block_bytes(self, block_size: int) -> int:
        """What one block of every layer takes on this rank."""
        return len(self.layers) * self.spec.bytes_per_token() * block_size

    def fixed_blocks(self, config: RunConfig) -> int:
        """Blocks of a group that is not the first."""
        assert self.window is not None, self.spec
        needed = WindowGroup.blocks_needed(
            self.window,
            config.tokens_per_block,
            config.max_batch_size,
            config.max_num_tokens,
            config.depth,
        )
        return int(needed * (1 + _REUSE_SHARE)) if config.block_reuse else needed

    def cache_group(self, num_blocks: int, config: RunConfig) -> CacheGroup:
        """The scheduler's side of it."""
        reuse = (config.block_reuse, config.partial_reuse)
        if self.window is None:
            return FullGroup(num_blocks, config.tokens_per_block, *reuse)
        return WindowGroup(num_blocks, config.tokens_per_block, self.window, *reuse)


def group_layers(layers: Sequence[CachedLayer], config: RunConfig) -> tuple[LayerGroup, ...]:
    """Layers with equal specs together, those that keep every token first.

    A window as long as the longest sequence is none; neither is one where every layer has it, since
    memory would lie idle that whole texts can use.
    """
    specs = [layer.cache_spec() for layer in layers]
    windows = [spec.window if isinstance(spec, FullKV) else None for spec in specs]
    is_idle = None not in windows  # all have one
    specs = [
        replace(spec, window=None)
        if isinstance(spec, FullKV) and (is_idle or (spec.window or 0) >= config.max_seq_len)
        else spec
        for spec in specs
    ]
    found: dict[CacheSpec, list[CachedLayer]] = {}
    for layer, spec in zip(layers, specs, strict=True):
        found.setdefault(spec, []).append(layer)
    groups = [LayerGroup(spec=spec, layers=tuple(own)) for spec, own in found.items()]
    groups.sort(key=lambda group: group.window is not None)
    assert all(group.window is not None for group in groups[1:]), "one group keeps every token"
    return tuple(groups)
