"""W4A8 GEMM on a GPU with FP8 tensor cores: INT4 becomes E4M3 in registers, four at a time.

Scales multiply the sums of their groups in fp32; what a tile sums up, the tensor cores add as they
do. The launch configs were never timed: no GPU has run this.

Legend: T tokens, I inputs, O outputs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.device import num_sms
from penstock.kernels.gemm.reduce import combine
from penstock.kernels.gemm.w4a8 import TILE, W4A8Weight, w4a8_linear
from penstock.kernels.launch import jit
from penstock.kernels.op import arch
from penstock.kernels.pdl import launch_options, let_next_start, wait_for_previous
from penstock.kernels.sizes import cdiv, next_power_of_2

_MAX_BLOCK_T = 128
_MAX_SMALL_BLOCK_T = 32  # memory-bound up to here
_MAX_SPLITS = 16

# Four bytes: no byte borrows from the next one, since a size is at most 7.
_AS_E4M3 = """
and.b32 sizes, halves, 0x07070707;
and.b32 signs, halves, 0x08080808;
sub.u32 eights, 0x08080808, sizes;
and.b32 eights, eights, signs;
shl.b32 signs, signs, 4;
or.b32 sizes, sizes, signs;
or.b32 $0, sizes, eights;
"""
_DECLARED = "{ .reg .b32 halves, sizes, signs, eights;"
LOW_AS_E4M3 = tl.constexpr(_DECLARED + "mov.b32 halves, $1;" + _AS_E4M3 + "}")
HIGH_AS_E4M3 = tl.constexpr(_DECLARED + "shr.b32 halves, $1, 4;" + _AS_E4M3 + "}")


@triton.jit
def _as_e4m3(halves, HIGH: tl.constexpr, ON_GPU: tl.constexpr):
    """2^-9 times the integers in the lower or upper halves of bytes."""
    if ON_GPU:
        bits = tl.inline_asm_elementwise(
            HIGH_AS_E4M3 if HIGH else LOW_AS_E4M3,
            "=r,r", [halves], dtype=tl.uint8, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        half = halves >> 4 if HIGH else halves & 15
        bits = tl.where(half == 8, 0x88, (half & 7) | (half & 8) << 4)
    return bits.to(tl.uint8).to(tl.float8e4nv, bitcast=True)


@jit(do_not_specialize=["num_tokens", "tiles_each"])
def _w4a8(
    x_ptr, x_scale_ptr, w_ptr, scales_ptr, bias_ptr, out_ptr,
    num_tokens, out_features, in_features, stride_x, tiles_each, tiles_per_group,
    HAS_BIAS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr, TILE: tl.constexpr,
    ON_GPU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[split, t, o] = sum over a split's inputs of x[t, i] * w[o, i]; the first adds the bias.

    Program (outputs, split, tokens). Outputs are the rows of the MMA, so that few tokens leave
    little of it empty. A tile is two products, of the lower and of the upper halves of its bytes.
    """
    let_next_start(PDL)
    HALF: tl.constexpr = TILE // 2
    outputs = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    is_output = outputs < out_features
    tokens = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_token = tokens < num_tokens
    at = tl.arange(0, HALF)[None, :]
    w_rows = w_ptr + outputs.to(tl.int64)[:, None] * (in_features // 2) + at
    x_rows = x_ptr + tokens.to(tl.int64)[:, None] * stride_x + at
    first_tile = tl.program_id(1) * tiles_each
    end_tile = tl.minimum(first_tile + tiles_each, in_features // TILE)
    acc = tl.zeros((BLOCK_O, BLOCK_T), tl.float32)
    wait_for_previous(PDL)
    for tile in range(first_tile, end_tile):
        halves = tl.load(w_rows + tile * HALF, mask=is_output[:, None], other=0)
        x_low = tl.load(x_rows + tile * TILE, mask=is_token[:, None], other=0.0)
        x_high = tl.load(x_rows + tile * TILE + HALF, mask=is_token[:, None], other=0.0)
        sums = tl.dot(_as_e4m3(halves, False, ON_GPU), tl.trans(x_low))
        sums = tl.dot(_as_e4m3(halves, True, ON_GPU), tl.trans(x_high), sums)
        scale_at = scales_ptr + tile // tiles_per_group * out_features + outputs
        acc += sums * tl.load(scale_at, mask=is_output, other=0.0).to(tl.float32)[:, None]
    acc *= 512.0 * tl.load(x_scale_ptr)
    if HAS_BIAS:
        is_first = is_output & (outputs < tl.where(first_tile == 0, out_features, 0))
        acc += tl.load(bias_ptr + outputs, mask=is_first, other=0.0).to(tl.float32)[:, None]
    to = (tl.program_id(1) * num_tokens + tokens).to(tl.int64)[None, :] * out_features
    mask = is_output[:, None] & is_token[None, :]
    tl.store(out_ptr + to + outputs[:, None], acc.to(out_ptr.dtype.element_ty), mask=mask)


def _num_splits(weight: W4A8Weight, block_t: int, num_blocks: int) -> int:
    """Small M is memory-bound: split-K until four programs per SM are in flight."""
    if block_t > _MAX_SMALL_BLOCK_T:
        return 1
    most = max(1, weight.in_features // TILE // 4)
    return max(1, min(4 * num_sms() // num_blocks, most, _MAX_SPLITS))


@w4a8_linear.impl(
    "triton",
    needs=arch(89),
    fits=lambda x_TI, scale_1, weight, bias_O, dtype: x_TI.shape[0] > 0,
)
def w4a8_linear_triton(x_TI, scale_1, weight, bias_O, dtype):
    assert x_TI.stride(1) == 1 and weight.group % TILE == 0, (x_TI.stride(), weight.group)
    num_tokens, out_features = x_TI.shape[0], weight.out_features
    block_t = min(_MAX_BLOCK_T, max(16, next_power_of_2(num_tokens)))
    block_o = 64 if block_t < _MAX_BLOCK_T else 128
    num_blocks, num_tiles = cdiv(out_features, block_o), weight.in_features // TILE
    tiles_each = cdiv(num_tiles, _num_splits(weight, block_t, num_blocks))
    num_splits = cdiv(num_tiles, tiles_each)
    parts: Tensor = torch.empty(
        (num_splits, num_tokens, out_features),
        dtype=dtype if num_splits == 1 else torch.float32,
        device=x_TI.device,
    )
    _w4a8[(num_blocks, num_splits, cdiv(num_tokens, block_t))](
        x_TI, scale_1, weight.halves_OB, weight.scales_GO, bias_O, parts,
        num_tokens, out_features, weight.in_features, x_TI.stride(0), tiles_each,
        weight.group // TILE, HAS_BIAS=bias_O is not None, BLOCK_T=block_t, BLOCK_O=block_o,
        TILE=TILE, ON_GPU=x_TI.is_cuda, num_warps=4 if block_o == 64 else 8, num_stages=4,
        **launch_options(x_TI),
    )  # fmt: skip
    return parts[0] if num_splits == 1 else combine(parts, num_tokens, dtype)
