"""The scheme of MXFP4 experts, weight-only: FP4 codes and a power of two per 32 inputs stay packed.

Activations have the model's dtype; everything but the experts is unquantized.
"""

import math
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock.kernels.moe import MXFP4_GROUP, ExpertWeights, pack_mxfp4
from penstock.parallel.parameter import new_parameter
from penstock.parallel.shard import Piece, Shard, Span
from penstock.quantization.scheme import ExpertsShape, apply_experts, create_expert_biases

_CODE_SPREAD = 2.93  # of codes that are all as likely


class Mxfp4Experts:
    group = MXFP4_GROUP

    def create(
        self, layer: Any, shape: ExpertsShape, dtype: torch.dtype, device: torch.device
    ) -> None:
        num_slots, size, features = shape.num_slots, shape.hidden_size, shape.features.size
        for part, outputs, inputs, pieces in (
            (layer.gate_up, 2 * features, size, shape.gate_up_pieces()),
            (layer.down, size, features, shape.down_pieces()),
        ):
            part.blocks = new_parameter(
                (num_slots, outputs, inputs // 2), torch.uint8, device, _by(2, pieces)
            )
            typical = 127 - round(math.log2(_CODE_SPREAD * math.sqrt(inputs)))
            part.scales = new_parameter(
                (num_slots, outputs, inputs // MXFP4_GROUP), torch.uint8, device,
                _by(MXFP4_GROUP, pieces), typical=(typical, 0.0),
            )  # fmt: skip
        create_expert_biases(layer, shape, dtype, device)

    def finish(self, layer: Any) -> None:
        for part in (layer.gate_up, layer.down):
            weight: ExpertWeights = pack_mxfp4(
                part.blocks.detach(), part.scales.detach(), layer.has_all
            )
            del part.blocks, part.scales
            part.weight = weight

    def apply(
        self, layer: Any, x_TD: Tensor, slots_TK: Tensor, weights_TK: Tensor, add_bias: bool
    ) -> Tensor:
        gate_up, down = layer.gate_up.weight, layer.down.weight
        return apply_experts(layer, x_TD, slots_TK, weights_TK, gate_up, down, add_bias)


def _by(number: int, pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
    """The same pieces, whose inputs are counted by `number`."""
    return tuple(Piece((*p.shards[:2], _shard_by(number, p.shards[2]))) for p in pieces)


def _shard_by(number: int, shard: Shard) -> Shard:
    source, target = shard.source, shard.target
    if shard.full_size % MXFP4_GROUP:
        raise ConfigError(
            f"the checkpoint has a scale for each {MXFP4_GROUP} inputs of its experts, and "
            f"config.json says that there are {shard.full_size}"
        )
    return Shard(
        full_size=shard.full_size // number,
        source=Span(source.start // number, source.size // number),
        target=Span(target.start // number, target.size // number),
    )
