"""Layers of many experts, of which each token uses a few: `route` chooses, `experts` computes."""

from penstock.kernels.moe.gate import SILU, Gate, gated
from penstock.kernels.moe.reference import Routing, experts, route
from penstock.kernels.moe.touched import touched_experts

__all__ = ["SILU", "Gate", "Routing", "experts", "gated", "route", "touched_experts"]
