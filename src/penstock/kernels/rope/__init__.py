"""What happens to queries, keys and values before attention: `rope_kv_write`."""

from penstock.kernels.rope.reference import rope_kv_write, rotate

__all__ = ["rope_kv_write", "rotate"]
