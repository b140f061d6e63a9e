"""From logits to tokens: `argmax`, `gumbel_argmax`, `sampling_cutoffs`, `apply_penalties`."""

from penstock.kernels.sampling.reference import (
    apply_penalties,
    argmax,
    gumbel_argmax,
    sampling_cutoffs,
)

__all__ = ["apply_penalties", "argmax", "gumbel_argmax", "sampling_cutoffs"]
