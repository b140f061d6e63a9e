"""What the kernels of experts share: the gate, and codes of 4 bits made floats."""

import triton
import triton.language as tl


@triton.jit
def gate_of(gate, up, alpha, shift, limit):
    gate, up = tl.minimum(gate, limit), tl.minimum(tl.maximum(up, -limit), limit)
    return (up + shift) * gate / (1.0 + tl.exp(-alpha * gate))


@triton.jit
def mxfp4_pairs(words, J: tl.constexpr):
    """Two codes of each word as two bfloat16 in 32 bits, both 2^-126 times their value.

    The bits of a code are the lowest of an exponent and the highest of a mantissa; those without an
    exponent become subnormal numbers, which is what they are in 4 bits, too.
    """
    if J < 3:
        pairs = (words << (6 - 3 * J)) & -0x7E3F7E40
    else:
        pairs = ((words << 1) & -0x7FFF8000) | ((words >> 3) & 0x01800180)
        pairs |= (words >> 7) & 0x00400040
    return pairs


@triton.jit
def halves(pairs):
    """Two bfloat16 in 32 bits as floats."""
    return (pairs << 16).to(tl.float32, bitcast=True), (pairs & -65536).to(tl.float32, bitcast=True)


@triton.jit
def dot(x, y, acc, ON_GPU: tl.constexpr):
    if not ON_GPU:  # the interpreter takes bfloat16 for whole numbers
        x, y = x.to(tl.float32), y.to(tl.float32)
    return tl.dot(x, y, acc, input_precision="ieee")
