"""Which layers share a cache group.

The first group keeps every token and takes the memory that the others leave. A group of windows
needs a number of blocks that follows from the settings alone; for states see `memory.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.config.run import RunConfig
from penstock.layers.cached import CachedLayer
from penstock.types.cache_spec import (
    CacheSpec,
    FullKV,
    LatentKV,
    RecurrentState,
    block_bytes,
    window_blocks_needed,
)

_REUSED_WINDOWS = 1  # for each row, so that prefixes are found for a while


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """`beside`: layers that keep other things of the same tokens, in blocks of the same numbers."""

    spec: CacheSpec
    layers: tuple[CachedLayer, ...]
    beside: tuple["LayerGroup", ...] = ()

    @property
    def parts(self) -> tuple["LayerGroup", ...]:
        """Of one spec each."""
        return (self, *self.beside)

    @property
    def window(self) -> int | None:
        return self.spec.window if isinstance(self.spec, FullKV) else None

    @property
    def has_states(self) -> bool:
        """One block holds all that is kept of a sequence."""
        return isinstance(self.spec, RecurrentState)

    @property
    def keeps_all(self) -> bool:
        return _keeps_all(self.spec)

    def block_bytes(self, block_size: int) -> int:
        """What one block of every layer takes on this rank."""
        return sum(len(p.layers) * block_bytes(p.spec, block_size) for p in self.parts)

    def window_blocks(self, config: RunConfig) -> int:
        """Blocks of a group of windows."""
        assert self.window is not None, self.spec
        needed = window_blocks_needed(
            self.window + config.depth * config.max_drafts,
            config.tokens_per_block,
            config.max_batch_size,
            config.max_num_tokens,
            config.depth,
        )
        if not config.block_reuse:
            return needed
        per_window = self.blocks_per_sequence(config.tokens_per_block)
        return needed + _REUSED_WINDOWS * config.max_batch_size * per_window

    def blocks_per_sequence(self, block_size: int) -> int:
        """The most that a long sequence holds between two steps: its window, or its state."""
        if self.has_states:
            return 1
        assert self.window is not None, self.spec
        return -(-self.window // block_size) + 1


def _keeps_all(spec: CacheSpec) -> bool:
    match spec:
        case FullKV(window=window):
            return window is None
        case RecurrentState():
            return False
    return True


def group_layers(layers: Sequence[CachedLayer], config: RunConfig) -> tuple[LayerGroup, ...]:
    """Layers with equal specs together, those that keep every token first.

    A window as long as the longest sequence is none; neither is one where no layer keeps every
    token, since memory would lie idle that whole sequences can use.
    """
    specs = [layer.cache_spec() for layer in layers]
    is_idle = not any(map(_keeps_all, specs))
    specs = [
        replace(spec, window=None)
        if isinstance(spec, FullKV) and (is_idle or (spec.window or 0) >= config.max_seq_len)
        else spec
        for spec in specs
    ]
    # A window is short: every rank that shares a sequence's tokens keeps all of it.
    specs = [
        replace(spec, num_parts=config.mesh.cp)
        if isinstance(spec, FullKV | LatentKV) and _keeps_all(spec)
        else spec
        for spec in specs
    ]
    found: dict[CacheSpec, list[CachedLayer]] = {}
    for layer, spec in zip(layers, specs, strict=True):
        found.setdefault(spec, []).append(layer)
    groups = [LayerGroup(spec=spec, layers=tuple(own)) for spec, own in found.items()]
    first, *beside = [group for group in groups if group.keeps_all]
    groups = [
        replace(first, beside=tuple(beside)),
        *(group for group in groups if not group.keeps_all),
    ]
    assert [group.has_states for group in groups].count(True) <= 1, "layers have equal states"
    return tuple(groups)
