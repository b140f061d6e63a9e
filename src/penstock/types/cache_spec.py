"""What one layer must remember. Layers with equal specs share a cache group.

A layer's memory is one or more planes, each of them blocks of the same shape. With context
parallelism rank r has the r-th of the equal parts of a block's tokens.
"""

import math
from dataclasses import dataclass

RESERVED_BLOCKS = 1  # block 0 belongs to nobody: padded device rows write there

DTYPE_BYTES = {
    "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int8": 1, "uint8": 1,
}  # fmt: skip
NVFP4 = "float4_e2m1fn_x2"  # torch's name of two E2M1 codes in a byte
NVFP4_GROUP = 16  # channels that share a scale


@dataclass(frozen=True, slots=True)
class Plane:
    shape: tuple[int, ...]  # of one block
    dtype: str

    @property
    def block_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class FullKV:
    """Keys and values of every token, or of the last `window` ones.

    Integers (int8) have scales beside them: of each token and head, one of the key and one of
    the value. So have 4-bit floats (NVFP4), but of every 16 channels of a head.
    """

    num_kv_heads: int  # on this rank
    head_size: int
    dtype: str  # "bfloat16", "float16", "float32", "float8_e4m3fn", "int8", `NVFP4`
    window: int | None = None
    num_parts: int = 1  # ranks that share the tokens of a block

    def planes(self, block_size: int) -> tuple[Plane, ...]:
        """Keys, values; of integers and NVFP4 also the scales of both."""
        places, size = (self.num_kv_heads, block_size // self.num_parts), self.head_size
        if self.dtype == NVFP4:
            codes = Plane((*places, size // 2), "uint8")
            scales = Plane((*places, size // NVFP4_GROUP), "float8_e4m3fn")
            return (codes, codes, scales, scales)
        numbers = Plane((*places, size), self.dtype)
        scales = Plane(places, "float32")
        return (numbers, numbers, scales, scales) if self.dtype == "int8" else (numbers, numbers)

    def bytes_per_token(self) -> int:
        return sum(plane.block_bytes for plane in self.planes(1))


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentKV:
    """One vector per token, from which every head's key and value follow: a latent, then the part
    of the key that is rotated. The same on every rank, however the heads are split."""

    latent_size: int
    rope_size: int
    dtype: str
    num_parts: int = 1  # as above

    def planes(self, block_size: int) -> tuple[Plane, ...]:
        block_size //= self.num_parts
        return (Plane((block_size, self.latent_size + self.rope_size), self.dtype),)

    def bytes_per_token(self) -> int:
        return (self.latent_size + self.rope_size) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentState:
    """One block for a whole sequence, however long it is: two arrays, renewed by every step."""

    num_past: int  # inputs of the convolution
    num_channels: int  # on this rank, as below
    conv_dtype: str
    num_value_heads: int
    key_size: int
    value_size: int
    state_dtype: str = "float32"  # it accumulates all tokens: a short float would lose them

    def planes(self, block_size: int) -> tuple[Plane, ...]:
        return (
            Plane((self.num_past, self.num_channels), self.conv_dtype),
            Plane((self.num_value_heads, self.key_size, self.value_size), self.state_dtype),
        )


CacheSpec = FullKV | LatentKV | RecurrentState


def block_bytes(spec: CacheSpec, block_size: int) -> int:
    """What one block of one layer takes on this rank."""
    return sum(plane.block_bytes for plane in spec.planes(block_size))


def window_blocks_needed(
    window: int, block_size: int, max_rows: int, max_step_tokens: int, depth: int
) -> int:
    """Blocks of a pool of windows that is never short.

    Every row has a window and the uneven ends of its tokens in flight, twice because a row may be
    taken while its last holder's blocks wait for a step. All tokens of steps in flight are kept;
    those of a holder that leaves wait for the last of its steps, while others follow.
    """
    per_row = -(-window // block_size) + 3
    per_step = -(-max_step_tokens // block_size) + max_rows
    return RESERVED_BLOCKS + 2 * max_rows * per_row + (2 * depth - 1) * per_step


def state_blocks_needed(max_rows: int) -> int:
    """Blocks of a pool of recurrent states, without snapshots."""
    return RESERVED_BLOCKS + max_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSize:
    """What of a cache is the same on every rank."""

    num_blocks: tuple[int, ...]  # of each group
    max_rows: int  # sequences that find room at once
    num_host_blocks: tuple[int, ...] = ()  # of each group in host memory; none: not swapped out

    def within(self, other: "CacheSize") -> "CacheSize":
        """The largest that is no larger than both."""
        blocks = zip(self.num_blocks, other.num_blocks, strict=True)
        return CacheSize(
            num_blocks=tuple(map(min, blocks)),
            max_rows=min(self.max_rows, other.max_rows),
            num_host_blocks=tuple(map(min, self.num_host_blocks, other.num_host_blocks)),
        )
