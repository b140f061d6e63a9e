"""Shard arithmetic: which part of a tensor one rank of a role holds. Numbers, no process group.

`Span` is a range along one dimension. `Piece` says which rectangle of a checkpoint tensor becomes
which rectangle of a parameter; layers state it, `weights/` obeys it.
"""

import math
from dataclasses import dataclass

from penstock.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Span:
    start: int
    size: int

    @property
    def stop(self) -> int:
        return self.start + self.size

    @property
    def slice(self) -> slice:
        return slice(self.start, self.stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One dimension: `source` of the `full_size` elements goes to `target` of the parameter."""

    full_size: int
    source: Span
    target: Span


@dataclass(frozen=True, slots=True)
class Piece:
    """One checkpoint tensor, or the part of it that this rank needs: one shard per dimension."""

    shards: tuple[Shard, ...]

    @property
    def full_shape(self) -> tuple[int, ...]:
        return tuple(shard.full_size for shard in self.shards)

    @property
    def source(self) -> tuple[slice, ...]:
        return tuple(shard.source.slice for shard in self.shards)

    @property
    def target(self) -> tuple[slice, ...]:
        return tuple(shard.target.slice for shard in self.shards)

    @property
    def num_values(self) -> int:
        return math.prod(shard.source.size for shard in self.shards)

    @property
    def is_empty(self) -> bool:
        return any(shard.source.size == 0 for shard in self.shards)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShard:
    """Heads of one rank. With more ranks than KV heads, a KV head lives on several."""

    query: Span
    kv: Span


def whole(size: int) -> Shard:
    return Shard(full_size=size, source=Span(0, size), target=Span(0, size))


def split(what: str, size: int, num_ranks: int, rank: int) -> Span:
    """The `rank`-th of `num_ranks` equal parts."""
    if size % num_ranks:
        raise ConfigError(
            f"{what} is {size}, which {num_ranks} ranks cannot share equally; "
            f"use a tensor-parallel size that divides {size}"
        )
    part = size // num_ranks
    return Span(rank * part, part)


def split_groups(what: str, size: int, group: int, num_ranks: int, rank: int) -> Span:
    """The `rank`-th of `num_ranks` parts, all of whole groups and as equal as these allow."""
    num_groups = -(-size // group)
    if num_groups < num_ranks:
        raise ConfigError(
            f"{what} is {size}, which is {num_groups} times {group} that must stay together; "
            f"use a tensor-parallel size of at most {num_groups}"
        )
    start, stop = (edge * num_groups // num_ranks * group for edge in (rank, rank + 1))
    return Span(start, min(stop, size) - start)


def split_heads(num_heads: int, num_kv_heads: int, num_ranks: int, rank: int) -> HeadShard:
    """Query heads split equally; KV heads split, or repeat when there are fewer than ranks."""
    query = split("the number of attention heads", num_heads, num_ranks, rank)
    if num_ranks <= num_kv_heads:
        return HeadShard(
            query=query, kv=split("the number of KV heads", num_kv_heads, num_ranks, rank)
        )
    if num_ranks % num_kv_heads:
        raise ConfigError(
            f"{num_kv_heads} KV heads cannot be repeated over {num_ranks} ranks; "
            f"use a tensor-parallel size that is a multiple or a divisor of {num_kv_heads}"
        )
    return HeadShard(query=query, kv=Span(rank * num_kv_heads // num_ranks, 1))


def split_padded(size: int, num_ranks: int, rank: int, multiple: int) -> tuple[Shard, int]:
    """This rank's shard of `size` rows, and how many rows it holds: the same on every rank, a
    multiple of `multiple`; the last ones may be padding."""
    num_rows = -(-size // (num_ranks * multiple)) * multiple
    start = min(rank * num_rows, size)
    taken = min(num_rows, size - start)
    return Shard(full_size=size, source=Span(start, taken), target=Span(0, taken)), num_rows


def stack_shards(parts: list[tuple[int, Span]]) -> tuple[Shard, ...]:
    """Several tensors laid one after the other; a part is (full size, what is taken of it)."""
    shards, offset = [], 0
    for full_size, source in parts:
        shards.append(Shard(full_size=full_size, source=source, target=Span(offset, source.size)))
        offset += source.size
    return tuple(shards)
