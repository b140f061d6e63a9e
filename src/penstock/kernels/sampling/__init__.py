"""From logits to tokens: `argmax`, `gumbel_argmax`, `filter_thresholds`, `apply_penalties`,
`apply_bitmask`."""

from penstock.kernels.sampling.reference import (
    apply_bitmask,
    apply_penalties,
    argmax,
    filter_thresholds,
    gumbel_argmax,
)

__all__ = ["apply_bitmask", "apply_penalties", "argmax", "filter_thresholds", "gumbel_argmax"]
