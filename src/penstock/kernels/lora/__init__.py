"""Low-rank adapters of linear layers, several in one batch: `lora`, `lora_groups`."""

from penstock.kernels.lora.reference import lora, lora_groups

__all__ = ["lora", "lora_groups"]
