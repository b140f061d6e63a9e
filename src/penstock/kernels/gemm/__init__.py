"""Products with weights that stay: `linear`, and the layout it is fastest with."""

from penstock.kernels.gemm.dense import linear, packed

__all__ = ["linear", "packed"]
