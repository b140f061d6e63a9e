"""Gated activations: `gelu_mul`, `sigmoid_mul`, `silu_mul`."""

from penstock.kernels.activation.reference import gelu_mul, sigmoid_mul, silu_mul

__all__ = ["gelu_mul", "sigmoid_mul", "silu_mul"]
