"""RMS norms: `rms_norm` and, fused with the residual add, `add_rms_norm`."""

from penstock.kernels.norm.reference import add_rms_norm, rms_norm

__all__ = ["add_rms_norm", "rms_norm"]
