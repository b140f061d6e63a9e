"""`LayerContext`: what every layer needs to make its parameters. Handed down, never global."""

from dataclasses import dataclass

import torch

from penstock.kernels.attention.backend import AttentionBackend
from penstock.parallel.mesh import RankMesh
from penstock.quantization.scheme import TableScheme
from penstock.types.expert_slots import ExpertSlots


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsContext:
    """How layers of experts are computed."""

    by_reference: bool = False  # as the op's reference does, slow and plain
    max_tokens: int | None = None  # computed at once; more are cut into pieces
    all_to_all: bool = False  # tokens are sent to the ranks of their experts alone
    slots: ExpertSlots | None = None  # None: every expert has one
    counts_by_expert: bool = False  # what comes to experts of other ranks is told apart


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerContext:
    mesh: RankMesh
    dtype: torch.dtype
    device: torch.device
    cache_dtype: torch.dtype  # of keys and values
    tables: TableScheme  # of the embedding and the head; linear layers are given theirs by name
    attention: AttentionBackend
    experts: ExpertsContext
    num_positions: int | None = None  # of a sequence in this run; None: all the model has
    has_mtp: bool = False  # whether the model's MTP head is built
    captured_layers: tuple[int, ...] = ()  # whose hidden states a drafter reads
    draft_head_embeds: bool = False  # whether what drafts has the model's own embedding
