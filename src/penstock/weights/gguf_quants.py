"""GGUF blocks -> integer codes, scales and minima, without loss: weight = scale * code + minimum.

One function per type; each follows the block's C struct in the order of its bytes. Types that are
no such sum (floats, those with tables) are not here and are dequantized to fp32 instead.

Legend: R rows, B blocks of a row, S groups of a block, V values of a group or a part of it.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from penstock.kernels.quantized_weight import QuantizedWeight

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Parts = tuple[NDArray[Any], Floats, Floats]  # codes [.., V], scales [.., S], minima [.., S]


def quantized_rows(lines: Bytes, kind: GGMLQuantizationType) -> QuantizedWeight | None:
    """The rows in `lines`; None for a type that has no codes."""
    if kind not in _READERS:
        return None
    num_rows, _ = lines.shape
    blocks = lines.reshape(num_rows, -1, GGML_QUANT_SIZES[kind][1])
    codes, scales, minima = _READERS[kind](blocks)
    return QuantizedWeight(
        "affine",
        torch.from_numpy(np.ascontiguousarray(codes.reshape(num_rows, -1), np.int8)),
        torch.from_numpy(np.ascontiguousarray(scales.reshape(num_rows, -1), np.float32)),
        minima_OG=torch.from_numpy(np.ascontiguousarray(minima.reshape(num_rows, -1), np.float32)),
    )


def _half(data: Bytes) -> Floats:
    """Two bytes -> one value per block: [R, B, 1]."""
    return np.ascontiguousarray(data).view(np.float16).astype(np.float32)


def _nibbles(data: Bytes) -> Bytes:
    """All low halves, then all high ones."""
    return np.concatenate((data & 15, data >> 4), axis=-1)


def _fifth_bits(data: Bytes) -> Bytes:
    """Bit v of four bytes, as 16 for value v."""
    return np.unpackbits(data, axis=-1, bitorder="little") << np.uint8(4)


def _q4_0(blocks: Bytes) -> Parts:
    scale = _half(blocks[..., :2])
    return _nibbles(blocks[..., 2:]), scale, -8 * scale


def _q4_1(blocks: Bytes) -> Parts:
    return _nibbles(blocks[..., 4:]), _half(blocks[..., :2]), _half(blocks[..., 2:4])


def _q5_0(blocks: Bytes) -> Parts:
    scale = _half(blocks[..., :2])
    codes = _nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])
    return codes.astype(np.int8) - np.int8(16), scale, 0 * scale


def _q5_1(blocks: Bytes) -> Parts:
    codes = _nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])
    return codes, _half(blocks[..., :2]), _half(blocks[..., 2:4])


def _q8_0(blocks: Bytes) -> Parts:
    scale = _half(blocks[..., :2])
    return np.ascontiguousarray(blocks[..., 2:]).view(np.int8), scale, 0 * scale


def _k_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    """Eight scales and minima of a block of Q4_K or Q5_K, six bits each in bytes 4..15."""
    first, second, third = (blocks[..., 4 + 4 * i : 8 + 4 * i] for i in range(3))
    scales = np.concatenate((first & 63, (third & 15) | (first >> 6) << 4), axis=-1)
    minima = np.concatenate((second & 63, (third >> 4) | (second >> 6) << 4), axis=-1)
    return _half(blocks[..., :2]) * scales, -_half(blocks[..., 2:4]) * minima


def _pairs_of_32(data: Bytes) -> Bytes:
    """Of each 32 bytes the low halves, then the high ones: [R, B, S, 32]."""
    lines = data.reshape(*data.shape[:2], -1, 1, 32)
    return np.concatenate((lines & 15, lines >> 4), axis=-2).reshape(*data.shape[:2], -1, 32)


def _q4_k(blocks: Bytes) -> Parts:
    return _pairs_of_32(blocks[..., 16:]), *_k_scales(blocks)


def _q5_k(blocks: Bytes) -> Parts:
    places = np.arange(8, dtype=np.uint8)[:, None]
    high = (blocks[..., None, 16:48] >> places) & 1
    return _pairs_of_32(blocks[..., 48:]) | high << 4, *_k_scales(blocks)


def _two_bits(data: Bytes) -> NDArray[Any]:
    """Of each 32 bytes the lowest two bits, then the next: [R, B, halves, 4, 32]."""
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    return data.reshape(*data.shape[:2], -1, 1, 32) >> shifts & 3


def _q6_k(blocks: Bytes) -> Parts:
    low = blocks[..., :128].reshape(*blocks.shape[:2], 2, 64)
    low = np.concatenate((low & 15, low >> 4), axis=-1)  # four parts of 32 per half
    codes = low | _two_bits(blocks[..., 128:192]).reshape(low.shape) << 4
    scales = _half(blocks[..., 208:]) * np.ascontiguousarray(blocks[..., 192:208]).view(np.int8)
    return codes.astype(np.int8) - np.int8(32), scales, 0 * scales


def _q2_k(blocks: Bytes) -> Parts:
    scales = _half(blocks[..., 80:82]) * (blocks[..., :16] & 15)
    minima = -_half(blocks[..., 82:84]) * (blocks[..., :16] >> 4)
    return _two_bits(blocks[..., 16:80]), scales, minima


def _q3_k(blocks: Bytes) -> Parts:
    places = np.arange(8, dtype=np.uint8).reshape(2, 4, 1)
    is_high = blocks[..., None, None, :32] >> places & 1
    codes = (_two_bits(blocks[..., 32:96]) | is_high << 2).astype(np.int8) - np.int8(4)
    low = _nibbles(blocks[..., 96:104])
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = (blocks[..., None, 104:108] >> shifts & 3).reshape(low.shape)
    six_bits = (low | high << 4).astype(np.float32)
    scales = _half(blocks[..., 108:]) * (six_bits - 32)
    return codes, scales, 0 * scales


_READERS: dict[GGMLQuantizationType, Callable[[Bytes], Parts]] = {
    GGMLQuantizationType.Q4_0: _q4_0,
    GGMLQuantizationType.Q4_1: _q4_1,
    GGMLQuantizationType.Q5_0: _q5_0,
    GGMLQuantizationType.Q5_1: _q5_1,
    GGMLQuantizationType.Q8_0: _q8_0,
    GGMLQuantizationType.Q2_K: _q2_k,
    GGMLQuantizationType.Q3_K: _q3_k,
    GGMLQuantizationType.Q4_K: _q4_k,
    GGMLQuantizationType.Q5_K: _q5_k,
    GGMLQuantizationType.Q6_K: _q6_k,
}
