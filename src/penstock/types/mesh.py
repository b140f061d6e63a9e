"""`MeshShape`: the ranks of an engine as a mesh of named axes. Sizes and numbers, no processes.

Ranks are numbered with the last axis fastest. Attention sees the ranks of a stage as dp x cp x tp,
layers of experts see the same ranks as etp x ep: so each rank has a coordinate on every axis.
"""

import itertools
import math
from dataclasses import dataclass

from penstock.errors import ConfigError

ATTENTION_AXES = ("dp", "cp", "tp")
EXPERT_AXES = ("etp", "ep")


def stage_layers(num_layers: int, num_stages: int) -> list[range]:
    """Of each stage. What is left over goes to stages in the middle, then to the first: the last
    one also has the head, the first one the embedding."""
    assert num_layers >= num_stages, (num_layers, num_stages)
    order = [*range(1, num_stages - 1), 0, num_stages - 1]
    sizes = [num_layers // num_stages] * num_stages
    for stage in order[: num_layers % num_stages]:
        sizes[stage] += 1
    ends = list(itertools.accumulate(sizes))
    return [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshShape:
    pp: int = 1  # stages of layers
    dp: int = 1  # sets of ranks with sequences and a cache of their own
    cp: int = 1  # ranks that share the tokens of a sequence
    tp: int = 1  # ranks that share the heads of attention
    ep: int = 1  # sets of ranks with other experts; the ranks of a set shard each expert

    def __post_init__(self) -> None:
        if self.stage_size % self.ep:
            raise ConfigError(
                f"{self.ep} sets of experts do not fit {self.stage_size} ranks "
                f"({self._in_words(ATTENTION_AXES)}); use a divisor of {self.stage_size}"
            )

    @property
    def stage_size(self) -> int:
        """Ranks that run the same layers."""
        return self.dp * self.cp * self.tp

    @property
    def etp(self) -> int:
        """Ranks that shard each of their experts."""
        return self.stage_size // self.ep

    @property
    def size(self) -> int:
        return self.pp * self.stage_size

    def __str__(self) -> str:
        """Sizes and their product, axes of one rank left out."""
        axes = [axis for axis in ("pp", *ATTENTION_AXES) if getattr(self, axis) > 1]
        ranks = f"{self._in_words(tuple(axes))} = {self.size} ranks" if axes else "1 rank"
        return ranks if self.ep == 1 else f"{ranks}, experts {self._in_words(EXPERT_AXES)}"

    def _in_words(self, axes: tuple[str, ...]) -> str:
        return " x ".join(f"{axis} {getattr(self, axis)}" for axis in axes)

    def coordinate(self, axis: str, rank: int) -> int:
        return self._coordinates(rank)[axis]

    def is_sampling_rank(self, rank: int) -> bool:
        """Whether it chooses tokens: the first of each data-parallel rank, in the last stage."""
        own = self._coordinates(rank)
        return own["pp"] == self.pp - 1 and own["cp"] == own["tp"] == 0

    def group(self, axes: tuple[str, ...], rank: int) -> tuple[int, ...]:
        """The ranks that differ from `rank` on no other axis of the same view, in order."""
        view = EXPERT_AXES if set(axes) <= set(EXPERT_AXES) else ATTENTION_AXES
        fixed = [axis for axis in ("pp", *view) if axis not in axes]
        own = self._coordinates(rank)
        return tuple(
            other
            for other in range(self.size)
            if (found := self._coordinates(other)) and all(found[a] == own[a] for a in fixed)
        )

    def groups(self, axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """All such groups; each rank is in one."""
        return tuple(dict.fromkeys(self.group(axes, rank) for rank in range(self.size)))

    def _coordinates(self, rank: int) -> dict[str, int]:
        assert 0 <= rank < self.size, (rank, self)
        found = {"pp": rank // self.stage_size}
        for view in (ATTENTION_AXES, EXPERT_AXES):
            sizes = [getattr(self, axis) for axis in view]
            for at, axis in enumerate(view):
                found[axis] = rank % self.stage_size // math.prod(sizes[at + 1 :]) % sizes[at]
        return found
