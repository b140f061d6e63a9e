"""Sums of what ranks have: `sum_parts`, and fused with residual and norm, `sum_add_rms_norm`."""

from penstock.kernels.all_reduce.reference import sum_add_rms_norm, sum_parts

__all__ = ["sum_add_rms_norm", "sum_parts"]
