"""GEMMs of block-scaled weights and activations on Blackwell, whose tensor cores multiply groups by
their scales: `tl.dot_scaled` becomes tcgen05.mma on sm_100 and mma.sync on sm_120, both with
block_scale. The launch configs were never timed: no such GPU has run this.

Legend: T tokens, I inputs, O outputs, S slots; tokens may be pairs of one and an expert.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.device import probe
from penstock.kernels.gemm.block_scaled import ScaledWeight, scaled_linear
from penstock.kernels.launch import jit
from penstock.kernels.moe.weights import pointer
from penstock.kernels.op import arch
from penstock.kernels.pdl import launch_options, let_next_start, wait_for_previous
from penstock.kernels.quantize.block_scaled import MXFP8_GROUP, quantize_mxfp8, quantize_nvfp4
from penstock.kernels.quantized_weight import FP4_GROUP
from penstock.kernels.sizes import cdiv, next_power_of_2

MAX_BLOCK_T = 128
_BLOCK_O = 128  # rows that tcgen05.mma takes
_TILE_I = 128
_MIXED_ARCH = 120  # from here on the tensor cores take no E2M1 beside E4M3


@triton.jit
def _as_e4m3(pairs):
    """[R, 2 B] of [R, B] bytes of two E2M1 codes: all of their values are ones of E4M3, too."""
    codes = tl.join(pairs & 15, pairs >> 4).to(tl.int32)
    codes = tl.reshape(codes, (pairs.shape[0], 2 * pairs.shape[1]))
    size = codes & 7
    bits = tl.where(size < 2, size * 0x30, 0x30 + 4 * size) | (codes & 8) << 4
    return bits.to(tl.uint8).to(tl.float8e4nv, bitcast=True)


@jit(do_not_specialize=["num_tokens"])
def _scaled(
    x_ptr, x_scales_ptr, x_outer_ptr, w_ptr, w_scales_ptr, outer_ptr, bias_ptr, out_ptr,
    slots_ptr, pairs_ptr, weights_ptr, num_tokens, out_features, in_features, num_slots,
    X_FORMAT: tl.constexpr, GROUP: tl.constexpr, WIDENS: tl.constexpr, HAS_OUTER: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SLOTS: tl.constexpr, PAIRS_PER_ROW: tl.constexpr,
    IS_WEIGHTED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr, TILE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out[t, o] = sum over i of x[t, i] * w[o, i] + bias[o], times the scales of both.

    Program (outputs, tokens). Outputs are the rows of the MMA, so that few tokens leave little of
    it empty. HAS_SLOTS: each block of tokens has the matrix of its slot, tokens are pairs, and
    x[pair // PAIRS_PER_ROW] theirs. WIDENS: weights become E4M3 first.
    """
    let_next_start(PDL)
    X_PACK: tl.constexpr = 2 if X_FORMAT == "e2m1" else 1
    outputs = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    is_output = outputs < out_features
    block = tl.program_id(1)
    tokens = block * BLOCK_T + tl.arange(0, BLOCK_T)
    wait_for_previous(PDL)
    if HAS_SLOTS:
        slot = tl.load(slots_ptr + block).to(tl.int64)
        if slot >= num_slots:
            return
        tokens = tl.load(pairs_ptr + tokens)
        w_ptr += slot * out_features * (in_features // 2)
        w_scales_ptr += slot * out_features * (in_features // GROUP)
        outer_ptr += slot * out_features
        bias_ptr += slot * out_features
    is_token = tokens < num_tokens
    rows = (tokens // PAIRS_PER_ROW).to(tl.int64)[:, None]
    x_rows, x_scale_rows = x_ptr + rows * (in_features // X_PACK), rows * (in_features // GROUP)
    w_rows = outputs.to(tl.int64)[:, None]
    w_scale_rows = w_rows * (in_features // GROUP)
    w_rows = w_ptr + w_rows * (in_features // 2)
    acc = tl.zeros((BLOCK_O, BLOCK_T), tl.float32)
    for start in range(0, in_features, TILE):
        at = (start // 2 + tl.arange(0, TILE // 2))[None, :]
        mask = is_output[:, None] & (at < in_features // 2)
        w = tl.load(w_rows + at, mask=mask, other=0)
        at = (start // X_PACK + tl.arange(0, TILE // X_PACK))[None, :]
        mask = is_token[:, None] & (at < in_features // X_PACK)
        x = tl.load(x_rows + at, mask=mask, other=0.0)
        at = (start // GROUP + tl.arange(0, TILE // GROUP))[None, :]
        is_group = at < in_features // GROUP
        mask = is_output[:, None] & is_group
        w_scales = tl.load(w_scales_ptr + w_scale_rows + at, mask=mask, other=0.0)
        mask = is_token[:, None] & is_group
        x_scales = tl.load(x_scales_ptr + x_scale_rows + at, mask=mask, other=0.0)
        if WIDENS:
            w = _as_e4m3(w)
            acc = tl.dot_scaled(w, w_scales, "e4m3", tl.trans(x), x_scales, X_FORMAT, acc)
        else:
            acc = tl.dot_scaled(w, w_scales, "e2m1", tl.trans(x), x_scales, X_FORMAT, acc)
    if HAS_OUTER:
        outer = tl.load(outer_ptr + outputs, mask=is_output, other=0.0)
        acc *= (outer * tl.load(x_outer_ptr))[:, None]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + outputs, mask=is_output, other=0.0).to(tl.float32)[:, None]
    if IS_WEIGHTED:
        acc *= tl.load(weights_ptr + tokens, mask=is_token, other=0.0)[None, :]
    to = out_ptr + tokens.to(tl.int64)[None, :] * out_features + outputs[:, None]
    tl.store(to, acc.to(out_ptr.dtype.element_ty), mask=is_output[:, None] & is_token[None, :])


def multiply(
    x: Tensor,
    weight: ScaledWeight,
    bias: Tensor | None,
    num_tokens: int,
    block_t: int,
    *,
    slots_B: Tensor | None = None,
    pairs_BM: Tensor | None = None,
    weights_P: Tensor | None = None,
) -> Tensor:
    """[tokens, outputs]; with `slots_B` tokens are pairs."""
    if weight.input_scale_1 is None:
        values, scales = quantize_mxfp8(x)
    else:
        values, scales = quantize_nvfp4(x, weight.input_scale_1)
    out = torch.empty((num_tokens, weight.out_features), dtype=x.dtype, device=x.device)
    num_blocks = cdiv(num_tokens, block_t) if slots_B is None else len(slots_B)
    _scaled[(cdiv(weight.out_features, _BLOCK_O), num_blocks)](
        values, scales, pointer(weight.input_scale_1, out), weight.codes_OB, weight.scales_OG,
        pointer(weight.outer_O, out), pointer(bias, out), out, slots_B, pairs_BM, weights_P,
        num_tokens, weight.out_features, weight.in_features, weight.num_slots,
        X_FORMAT="e2m1" if weight.is_nvfp4 else "e4m3",
        GROUP=FP4_GROUP if weight.is_nvfp4 else MXFP8_GROUP,
        WIDENS=not weight.is_nvfp4 and probe().arch >= _MIXED_ARCH,
        HAS_OUTER=weight.outer_O is not None, HAS_BIAS=bias is not None,
        HAS_SLOTS=slots_B is not None, PAIRS_PER_ROW=num_tokens // x.shape[0],
        IS_WEIGHTED=weights_P is not None, BLOCK_T=block_t, BLOCK_O=_BLOCK_O, TILE=_TILE_I,
        num_warps=4, num_stages=3, **launch_options(x),
    )  # fmt: skip
    return out


@scaled_linear.impl("triton", needs=arch(100), fits=lambda x_TI, weight, bias_O: x_TI.shape[0] > 0)
def scaled_linear_triton(x_TI, weight, bias_O):
    num_tokens = x_TI.shape[0]
    block_t = min(MAX_BLOCK_T, max(16, next_power_of_2(num_tokens)))
    return multiply(x_TI, weight, bias_O, num_tokens, block_t)
