"""FP4 (E2M1) codes dequantized to bfloat16 in registers, two at a time."""

import triton
import triton.language as tl


@triton.jit
def mxfp4_pairs(words, J: tl.constexpr):
    """Two codes of each word as two bfloat16 in 32 bits, both 2^-126 times their value.

    The bits of a code are the lowest of an exponent and the highest of a mantissa; those without an
    exponent become subnormal numbers, which is what they are in 4 bits, too.
    """
    words = words.to(tl.uint32, bitcast=True)
    if J == 0:
        pairs = (words << 4) & 0x81C081C0
    elif J == 1:
        pairs = ((words >> 2) | (words << 30)) & 0x81C081C0
    elif J == 2:
        pairs = ((words >> 6) | (words << 26)) & 0x81C081C0
    else:
        pairs = (words & 0x80C080C0) | ((words << 8) & 0x01000100)
    return pairs.to(tl.int32, bitcast=True)


@triton.jit
def factors_of(powers, J: tl.constexpr):
    """Two bfloat16 in 32 bits of a word of powers; `scaled_pairs` takes the J-th."""
    return (powers & 0x00FF00FF) << 7 if J % 2 == 0 else (powers >> 1) & 0x7F807F80


@triton.jit
def scaled_pairs(pairs, factors, J: tl.constexpr):
    """Both bfloat16 of each pair times the lower, or from J 2 on the higher, of its factors."""
    WHICH: tl.constexpr = "f, {low, low}" if J < 2 else "f, {high, high}"
    return tl.inline_asm_elementwise(
        "{ .reg .b16 low, high; .reg .b32 f, zero; mov.b32 {low, high}, $2; mov.b32 " + WHICH
        + "; mov.b32 zero, 0x80008000; fma.rn.bf16x2 $0, $1, f, zero; }",
        "=r,r,r", [pairs, factors], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def bf16_pair(pairs):
    """Two bfloat16 in 32 bits, the lower one first."""
    low = pairs.to(tl.int16).to(tl.bfloat16, bitcast=True)
    high = (pairs >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return tl.join(low, high)


@triton.jit
def halves(pairs):
    """Two bfloat16 in 32 bits as floats."""
    return (pairs << 16).to(tl.float32, bitcast=True), (pairs & -65536).to(tl.float32, bitcast=True)
