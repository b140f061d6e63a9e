"""Root-mean-square norms: `rms_norm` and, with the residual add in front, `add_rms_norm`."""

from penstock.kernels.norm.reference import add_rms_norm, rms_norm

__all__ = ["add_rms_norm", "rms_norm"]
