"""Layers of many experts, of which each token uses a few: `route` chooses, `experts` computes."""

from penstock.kernels.moe.gate import SILU, Gate, gated
from penstock.kernels.moe.reference import Routing, experts, route
from penstock.kernels.moe.touched import touched_experts
from penstock.kernels.moe.weights import (
    MXFP4_GROUP,
    ExpertWeights,
    mxfp4_values,
    pack_mxfp4,
    plain_weights,
)

__all__ = [
    "MXFP4_GROUP",
    "SILU",
    "ExpertWeights",
    "Gate",
    "Routing",
    "experts",
    "gated",
    "mxfp4_values",
    "pack_mxfp4",
    "plain_weights",
    "route",
    "touched_experts",
]
