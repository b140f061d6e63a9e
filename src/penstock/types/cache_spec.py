"""What one layer must remember. Layers with equal specs share a cache group.

A layer's memory is one or more planes, each of them blocks of the same shape.
"""

from dataclasses import dataclass

RESERVED_BLOCKS = 1  # block 0 belongs to nobody: padded device rows write there


@dataclass(frozen=True, slots=True, kw_only=True)
class FullKV:
    """Keys and values of every token, or of the last `window` ones."""

    num_kv_heads: int  # on this rank
    head_size: int
    dtype: str  # "bfloat16", "float16", "float32", "float8_e4m3fn"
    window: int | None = None

    @property
    def num_planes(self) -> int:
        return 2

    def block_shape(self, block_size: int) -> tuple[int, ...]:
        return (self.num_kv_heads, block_size, self.head_size)

    def bytes_per_token(self) -> int:
        return 2 * self.num_kv_heads * self.head_size * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentKV:
    """One vector per token, from which every head's key and value follow: a latent, then the part
    of the key that is rotated. The same on every rank, however the heads are split."""

    latent_size: int
    rope_size: int
    dtype: str

    @property
    def num_planes(self) -> int:
        return 1

    def block_shape(self, block_size: int) -> tuple[int, ...]:
        return (block_size, self.latent_size + self.rope_size)

    def bytes_per_token(self) -> int:
        return (self.latent_size + self.rope_size) * DTYPE_BYTES[self.dtype]


DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}

CacheSpec = FullKV | LatentKV
