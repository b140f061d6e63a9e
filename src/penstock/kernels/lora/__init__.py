"""Low-rank adapters of linear layers, several in one batch: `lora`."""

from penstock.kernels.lora.reference import lora

__all__ = ["lora"]
