"""INT4, INT8, E4M3 and NF4 codes, and FP4 scales, dequantized to bfloat16 in registers in pairs.

`J` is which of a word's four pairs. The layout of words is that of `wna16_packing`.
"""

import torch
import triton
import triton.language as tl

from penstock.kernels.quantized_weight import NF4_VALUES


@triton.jit
def int4_pairs(words, minus, J: tl.constexpr):
    """Codes less zero points: `minus` is -(128 + zero point), twice; 128 + code is added to it."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 code, one;
        lop3.b32 code, $1, 0x000F000F, 0x43004300, 0xEA; // 128 and the code
        mov.b32 one, 0x3F803F80; fma.rn.bf16x2 $0, code, one, $2;
        }""",
        "=r,r,r", [words >> (4 * J), minus], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def minus_zeros(zeros):
    """-(128 + zero) twice, of integers below 128."""
    return zeros * 0x00010001 - 0x3CFF3D00


@triton.jit
def int8_pairs(words, upper, J: tl.constexpr):
    """Codes less 128."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 one, sixteen, less, eight, low, high;
        lop3.b32 low, $1, 0x000F000F, 0x43004300, 0xEA; // 128 and four bits
        lop3.b32 high, $2, 0x000F000F, 0x43004300, 0xEA;
        mov.b32 one, 0x3F803F80; mov.b32 sixteen, 0x41804180;
        mov.b32 less, 0xC300C300; mov.b32 eight, 0xC308C308;
        fma.rn.bf16x2 low, low, one, less; fma.rn.bf16x2 high, high, one, eight;
        fma.rn.bf16x2 $0, high, sixteen, low;
        }""",
        "=r,r,r", [words >> (4 * J), upper >> (4 * J)], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def e4m3_pairs(words, upper, J: tl.constexpr):
    """Exponent and mantissa of a code are the lowest and the highest of a bfloat16's: that is
    2^-120 times its value."""
    low, high = words >> (4 * J), upper >> (4 * J)
    pairs = ((low & 0x000F000F) << 4) | ((high & 0x00070007) << 8) | ((high & 0x00080008) << 12)
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 factor, zero;
        mov.b32 factor, 0x7B807B80; mov.b32 zero, 0x80008000;
        fma.rn.bf16x2 $0, $1, factor, zero;
        }""",
        "=r,r", [pairs], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def fp4_factors(scales, J: tl.constexpr):
    """2^107 times two of a word's four scales, as bfloat16; `scaled_pairs` takes the J-th."""
    bits = scales << 4 if J % 2 == 0 else scales >> 4
    return (bits & 0x0FF00FF0) | 0x70007000


def _lookup() -> str:
    """Of four codes: each byte of their values in two tables of eight, whose index is three bits of
    a code, `at`; its highest bit says which table, as a byte of `which`."""

    def tables(shift: int) -> list[str]:
        numbers = torch.tensor(NF4_VALUES).bfloat16().view(torch.int16).int()
        packed = ((numbers >> shift) & 255).to(torch.uint8).view(torch.int32)
        return [f"0x{word & 0xFFFFFFFF:08X}" for word in packed.tolist()]

    lines = []
    for name, (a, b, c, d) in (("low", tables(0)), ("high", tables(8))):
        lines += [f"prmt.b32 {name}, {a}, {b}, at; prmt.b32 other, {c}, {d}, at;"]
        lines += [f"lop3.b32 {name}, which, other, {name}, 0xCA;"]
    return "\n".join(lines)


_LOOKUP = tl.constexpr(_lookup())


@triton.jit
def nf4_pairs(words, J: tl.constexpr):
    """Values of the table."""
    FIRST: tl.constexpr = "and.b32 at, $2, 0x7777; prmt.b32 which, $2, 0, 0xBA98;"
    SECOND: tl.constexpr = """shr.u32 at, $2, 16; and.b32 at, at, 0x7777;
        shl.b32 which, $2, 4; prmt.b32 which, which, 0, 0xBA98;"""
    first, second = tl.inline_asm_elementwise(
        "{ .reg .b32 at, which, low, high, other;" + (FIRST if J < 2 else SECOND) + _LOOKUP
        + "prmt.b32 $0, low, high, 0x5140; prmt.b32 $1, low, high, 0x7362; }",
        "=r,=r,r", [words], dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    return first if J % 2 == 0 else second
