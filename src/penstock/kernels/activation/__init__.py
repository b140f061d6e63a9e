"""Gated activations: `silu_mul`, `sigmoid_mul`."""

from penstock.kernels.activation.reference import sigmoid_mul, silu_mul

__all__ = ["sigmoid_mul", "silu_mul"]
