"""Mixture of experts: `router_logits` and `route` choose, `experts` computes, `add_shared` adds the
shared expert."""

from penstock.kernels.moe.activated_cpu import activated_experts
from penstock.kernels.moe.gate import SILU, Gate, gated
from penstock.kernels.moe.reference import Routing, add_shared, experts, route, router_logits
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
    "activated_experts",
    "add_shared",
    "experts",
    "gated",
    "mxfp4_values",
    "pack_mxfp4",
    "plain_weights",
    "route",
    "router_logits",
]
