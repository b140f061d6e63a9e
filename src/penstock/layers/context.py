"""`Build`: what every layer needs to make its parameters. Handed down, never global."""

from dataclasses import dataclass

import torch

from penstock.kernels.attention.backend import AttentionBackend
from penstock.parallel.mesh import RankMesh
from penstock.quant.scheme import TableScheme


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsBuild:
    """How layers of experts are computed."""

    by_reference: bool = False  # as the op's reference does, slow and plain
    max_tokens: int | None = None  # computed at once; more are cut into pieces
    num_sets: int = 1  # of ranks; each set has other experts, the ranks of a set share each of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    mesh: RankMesh
    dtype: torch.dtype
    device: torch.device
    cache_dtype: torch.dtype  # of keys and values
    tables: TableScheme  # of the embedding and the head; linear layers are given theirs by name
    attention: AttentionBackend
    experts: ExpertsBuild
