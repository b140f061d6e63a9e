"""Gated activations: `silu_mul`."""

from penstock.kernels.activation.reference import silu_mul

__all__ = ["silu_mul"]
