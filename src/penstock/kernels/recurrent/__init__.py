"""Recurrent layers (fixed-size state): short convolution, gated delta rule, its gates."""

from penstock.kernels.recurrent.reference import (
    causal_conv,
    delta_gates,
    gated_delta,
    keep_conv,
    keep_delta,
    rms_norm_gated,
)

__all__ = [
    "causal_conv", "delta_gates", "gated_delta", "keep_conv", "keep_delta", "rms_norm_gated",
]  # fmt: skip
