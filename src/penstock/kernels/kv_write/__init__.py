"""Writing new keys and values into the paged cache: `kv_write`."""

from penstock.kernels.kv_write.reference import kv_write

__all__ = ["kv_write"]
