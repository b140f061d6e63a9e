"""Rotary position embedding: `rope`, and `rope_kv_write` that also fills the cache."""

from penstock.kernels.rope.reference import rope, rope_kv_write

__all__ = ["rope", "rope_kv_write"]
