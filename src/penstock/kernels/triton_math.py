"""Math that kernels share: activations, the gate of experts, rounding to 8 and 4 bits, `dot`, and
which tile a program has."""

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
def _e2m1(x):
    """Codes of the nearest values, ties to the even one."""
    size = tl.abs(x)
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    code += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32)
    code += (size > 5.0).to(tl.int32)
    return code | (x < 0).to(tl.int32) << 3


@triton.jit
def _e4m3(x):
    """0 <= x <= 448 rounded to E4M3: its bits, and its value in fp32."""
    bits = x.to(tl.int32, bitcast=True)
    usual = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 values are multiples of 2^-9; adding 1.5 * 2^23 leaves no bit for a fraction.
    small = ((x * 512.0 + 12582912.0) - 12582912.0).to(tl.int32)
    code = tl.where(x < 0.015625, small, usual)
    value = tl.where(code < 8, code.to(tl.float32) * 0.001953125,
                     ((code + (120 << 3)) << 20).to(tl.float32, bitcast=True))  # fmt: skip
    return code, value


@triton.jit
def nvfp4_pairs(x_GC, outer):
    """(bytes of two codes [G, C / 2], bits of their scale in E4M3 [G]) of fp32 numbers, as
    `quantize_nvfp4` finds them."""
    largest = tl.max(tl.abs(x_GC), axis=1)
    scale = tl.minimum(tl.div_rn(largest, tl.zeros_like(largest) + 6.0 * outer), 448.0)
    bits, scale = _e4m3(scale)
    factor = scale * outer
    ones = tl.full(factor.shape, 1.0, tl.float32)
    inverse = tl.where(factor > 0, tl.div_rn(ones, tl.where(factor > 0, factor, 1.0)), 0.0)
    codes = _e2m1(x_GC * inverse[:, None])
    low, high = tl.split(tl.reshape(codes, (x_GC.shape[0], x_GC.shape[1] // 2, 2)))
    return (low | high << 4).to(tl.uint8), bits.to(tl.uint8)


@triton.jit
def nvfp4_values(codes, scales, GROUPED: tl.constexpr):
    """What bytes of two codes [..., C / 2] and the bits of E4M3 scales [..., C / 16] stand for, as
    GROUPED [..., C / 16, 16] in fp16, which holds them exactly.

    Codes and bits are moved to where fp16 has its exponent, which makes them smaller by a power of
    two, and shifts know no architecture without FP8.
    """
    low = ((codes & 7).to(tl.int16) << 9) | ((codes & 8).to(tl.int16) << 12)
    high = ((codes & 0x70).to(tl.int16) << 5) | ((codes & 0x80).to(tl.int16) << 8)
    values = tl.interleave(low.to(tl.float16, bitcast=True), high.to(tl.float16, bitcast=True))
    factors = (scales.to(tl.int16) << 7).to(tl.float16, bitcast=True) * 256.0
    return tl.reshape(values * 16384.0, GROUPED) * tl.expand_dims(factors, -1)


@triton.jit
def gate_of(gate, up, alpha, shift, limit):
    """As `moe.gate.gated`: (up + shift) * gate * sigmoid(alpha * gate), both clamped."""
    gate, up = tl.minimum(gate, limit), tl.minimum(tl.maximum(up, -limit), limit)
    return (up + shift) * gate / (1.0 + tl.exp(-alpha * gate))


@triton.jit
def in_bands(program, num_rows, num_columns, BAND: tl.constexpr):
    """(row, column) of a program's tile: programs follow each other down BAND rows before the next
    column, and find its weights in the L2."""
    band = program // (BAND * num_columns)
    height = tl.minimum(num_rows - band * BAND, BAND)
    within = program % (BAND * num_columns)
    return band * BAND + within % height, within // height


@triton.jit
def dot(x, y, acc, ON_GPU: tl.constexpr):
    """acc + x y. The interpreter takes bfloat16 for integers."""
    if not ON_GPU:
        x, y = x.to(tl.float32), y.to(tl.float32)
    return tl.dot(x, y, acc, input_precision="ieee")
