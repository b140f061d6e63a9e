"""`Build`: what every layer needs to make its parameters. Handed down, never global."""

from dataclasses import dataclass

import torch

from penstock.kernels.attention.backend import AttentionBackend
from penstock.parallel.mesh import RankMesh
from penstock.quant.scheme import LinearScheme


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    mesh: RankMesh
    dtype: torch.dtype
    device: torch.device
    scheme: LinearScheme
    attention: AttentionBackend
