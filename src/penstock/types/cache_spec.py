"""What one layer must remember. Layers with equal specs share a cache group."""

from dataclasses import dataclass

RESERVED_BLOCKS = 1  # block 0 belongs to nobody: padded device rows write there


@dataclass(frozen=True, slots=True, kw_only=True)
class FullKV:
    """Keys and values of every token; a window limits what attention reads, not what is kept."""

    num_kv_heads: int  # on this rank
    head_size: int
    dtype: str  # "bfloat16", "float16", "float32", "float8_e4m3fn"

    def bytes_per_token(self) -> int:
        return 2 * self.num_kv_heads * self.head_size * DTYPE_BYTES[self.dtype]


DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}

CacheSpec = FullKV  # a union once a second kind exists
