"""Math that kernels share: activations, the gate of experts, FP8 and INT8 rounding, `dot`."""

import triton
import triton.language as tl


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def gelu(x):
    """By tanh, of which (1 + tanh(u)) / 2 = sigmoid(2 u)."""
    return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))


@triton.jit
def fp8_clamp(x):
    """x within the range of E4M3, which has no infinity: a larger value would become NaN."""
    return tl.minimum(tl.maximum(x, -448.0), 448.0)


@triton.jit
def to_fp8(x, scale):
    """x / scale as E4M3, saturating."""
    return fp8_clamp(x / scale).to(tl.float8e4nv)


@triton.jit
def fp8_scale(amax):
    """The scale that maps `amax` to the largest E4M3 value; a row of zeros has one, too."""
    return tl.maximum(amax, 1e-12) / 448.0


@triton.jit
def round_to_even(x):
    """x as an integer, still fp32, ties to even: 1.5 * 2^23 leaves no bit for a fraction."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def gate_of(gate, up, alpha, shift, limit):
    """As `moe.gate.gated`: (up + shift) * gate * sigmoid(alpha * gate), both clamped."""
    gate, up = tl.minimum(gate, limit), tl.minimum(tl.maximum(up, -limit), limit)
    return (up + shift) * gate / (1.0 + tl.exp(-alpha * gate))


@triton.jit
def dot(x, y, acc, ON_GPU: tl.constexpr):
    """acc + x y. The interpreter takes bfloat16 for integers."""
    if not ON_GPU:
        x, y = x.to(tl.float32), y.to(tl.float32)
    return tl.dot(x, y, acc, input_precision="ieee")
