"""Grouped GEMM of experts on a GPU. Only activated experts are read, and no count leaves the GPU.

Small M: `moe.small_m`. More: pairs of a token and an expert are sorted by expert into blocks of one
expert each (`align`); the number of blocks is that of the worst case, and empty ones end at once.
Weights are the left operand, pairs the right one: an MMA takes 64 rows on the left, but as few as 8
columns on the right. MXFP4: `mxfp4_triton`; FP8 with block scales on Hopper: `fp8_hopper`.

Legend: T tokens, S slots, K experts of a token, P = T * K pairs, B blocks of pairs, M pairs of a
block, D hidden size, F features of an expert; N outputs of either GEMM.
"""

import functools
from dataclasses import dataclass

import triton.language as tl
from torch import Tensor

from penstock.kernels import tuned
from penstock.kernels.gemm.reduce import combine
from penstock.kernels.hopper import HopperKernels
from penstock.kernels.launch import jit
from penstock.kernels.moe import mxfp4_triton  # noqa: F401  registers
from penstock.kernels.moe.align import rows_per_block, sorted_pairs
from penstock.kernels.moe.reference import experts
from penstock.kernels.moe.small_m import bits_of, check, scale_strides, stride_of
from penstock.kernels.moe.weights import ExpertWeights, as_inputs, pointer
from penstock.kernels.op import arch, hopper
from penstock.kernels.pdl import launch_options, let_next_start, wait_for_previous
from penstock.kernels.sizes import cdiv
from penstock.kernels.triton_math import dot, gate_of, in_bands

_HOPPER = HopperKernels("penstock.kernels.moe.fp8_hopper", "experts in FP8 are computed")


@dataclass(frozen=True, slots=True)
class GroupedConfig:
    """Launch config of one GEMM."""

    outputs: int  # of a tile; with block scales they must lie in one block
    depth: int  # inputs at once; 128 with block scales
    num_warps: int
    num_stages: int
    band: int  # blocks of pairs that follow each other before the next outputs


@jit(do_not_specialize=["num_pairs", "num_blocks", "stride_x_scale_g"])
def _grouped(
    x_ptr, x_scale_ptr, w_ptr, w_scale_ptr, bias_ptr, weights_ptr, y_ptr, pairs_ptr,
    block_slots_ptr, stride_x, stride_x_scale_t, stride_x_scale_g, stride_w, stride_w_scale,
    num_pairs, num_blocks, S, N, in_features, alpha, shift, limit,
    FORMAT: tl.constexpr, PAIRS_PER_ROW: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_I: tl.constexpr, BAND: tl.constexpr, IS_GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr, ON_GPU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A block of pairs times some outputs of its slot's matrix.

    Gated: y[pair, n] = gate(x . w[slot, n], x . w[slot, N + n]), else weight * (x . w[slot, n]),
    with x = x[pair // PAIRS_PER_ROW].
    """
    let_next_start(PDL)
    wait_for_previous(PDL)
    num_n = tl.cdiv(N, BLOCK_N)
    block, column = in_bands(tl.program_id(0), num_blocks, num_n, BAND)
    first = column * BLOCK_N
    slot = tl.load(block_slots_ptr + block).to(tl.int64)
    if slot >= S:
        return
    pairs = tl.load(pairs_ptr + block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    outputs = first + tl.arange(0, BLOCK_N)
    is_pair, is_output = pairs < num_pairs, outputs < N
    x_ptr += (pairs // PAIRS_PER_ROW)[:, None] * stride_x
    x_scale_ptr += pairs // PAIRS_PER_ROW * stride_x_scale_t
    w_ptr += slot * stride_w
    w_scale_ptr += slot * stride_w_scale
    num_rows = 2 * N if IS_GATED else N
    y = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)

    w_rows = w_ptr + outputs[:, None].to(tl.int64) * in_features
    for start in range(0, in_features, BLOCK_I):
        inputs = start + tl.arange(0, BLOCK_I)
        is_input = inputs < in_features
        mask = is_pair[:, None] & is_input[None, :]
        x = tl.trans(tl.load(x_ptr + inputs[None, :], mask=mask, other=0.0))
        mask = is_output[:, None] & is_input[None, :]
        w = tl.load(w_rows + inputs[None, :], mask=mask, other=0.0)
        if IS_GATED:
            up_w = tl.load(w_rows + N * in_features + inputs[None, :], mask=mask, other=0.0)
        if FORMAT == "fp8 blocks":
            group, num_groups = start // 128, tl.cdiv(in_features, 128)
            x_scale_at = x_scale_ptr + group * stride_x_scale_g
            x_scale = tl.load(x_scale_at, mask=is_pair, other=0.0)[None, :]
            scale_at = w_scale_ptr + first // 128 * num_groups + group
            y += tl.dot(w, x) * (x_scale * tl.load(scale_at))
            if IS_GATED:
                scale = tl.load(scale_at + N // 128 * num_groups)
                up += tl.dot(up_w, x) * (x_scale * scale)
        else:
            y = dot(w, x, y, ON_GPU)
            if IS_GATED:
                up = dot(up_w, x, up, ON_GPU)
    if FORMAT == "fp8 outputs":
        x_scale = tl.load(x_scale_ptr, mask=is_pair, other=0.0)[None, :]
        w_scale_ptr += outputs
        y *= x_scale * tl.load(w_scale_ptr, mask=is_output, other=0.0)[:, None]
        if IS_GATED:
            up *= x_scale * tl.load(w_scale_ptr + N, mask=is_output, other=0.0)[:, None]

    if HAS_BIAS:
        bias_ptr += slot * num_rows + outputs
        y += tl.load(bias_ptr, mask=is_output, other=0.0).to(tl.float32)[:, None]
        if IS_GATED:
            up += tl.load(bias_ptr + N, mask=is_output, other=0.0).to(tl.float32)[:, None]
    if IS_GATED:
        y = gate_of(y, up, alpha, shift, limit)
    else:
        y *= tl.load(weights_ptr + pairs, mask=is_pair, other=0.0)[None, :]
    y_at = y_ptr + pairs[None, :] * N + outputs[:, None]
    mask = is_pair[None, :] & is_output[:, None]
    tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=mask)


@functools.cache
def grouped_config(
    out_features: int, in_features: int, bits: int, rows: int, is_gated: bool
) -> GroupedConfig:
    """A gated GEMM has two accumulators, so half the outputs in a tile of the same size.

    Few pairs are memory-bound: small tiles, many in flight. Many are bound by the tensor cores:
    large tiles, and blocks of an expert close together, which find its weights in the L2.
    """
    depth = {32: 32, 16: 64}.get(bits, 128)
    if rows <= 32:
        stages = 3 if bits == 8 else 4
        usual = GroupedConfig(outputs=64, depth=depth, num_warps=4, num_stages=stages, band=1)
    elif bits == 32:
        usual = GroupedConfig(outputs=64, depth=depth, num_warps=4, num_stages=3, band=4)
    else:
        outputs, num_warps = (64, 4) if is_gated else (128, 4 if bits == 8 and rows <= 64 else 8)
        usual = GroupedConfig(
            outputs=outputs, depth=depth, num_warps=num_warps, num_stages=3, band=4
        )
    return tuned.best(
        "experts grouped", usual, outputs=out_features, inputs=in_features, bits=bits, rows=rows
    )


def _fits_hopper(
    x_TD, slots_TK, weights_TK, gate_up, down, gate_up_bias_S2F, down_bias_SD, gate
) -> bool:
    has_bias = gate_up_bias_S2F is not None or down_bias_SD is not None
    kernels = None if has_bias else _HOPPER.module(x_TD)
    return kernels is not None and kernels.fits(x_TD, slots_TK, gate_up, down)


@experts.impl("hopper fp8 blocks", needs=hopper(), fits=_fits_hopper)
def experts_fp8_on_hopper(
    x_TD, slots_TK, weights_TK, gate_up, down, gate_up_bias_S2F, down_bias_SD, gate
):
    check(x_TD, slots_TK, weights_TK, gate_up.values, down.values, gate_up.scale, down.scale)
    y_TD = _HOPPER.result("experts", x_TD, slots_TK, weights_TK, gate_up, down, gate)
    if y_TD is None:
        biases = gate_up_bias_S2F, down_bias_SD
        return experts_grouped(x_TD, slots_TK, weights_TK, gate_up, down, *biases, gate)
    return y_TD


@experts.impl(
    "triton grouped",
    needs=arch(80),
    fits=lambda x_TD, slots_TK, weights_TK, gate_up, *_: (
        x_TD.shape[0] > 0 and gate_up.format != "mxfp4"
    ),
)
def experts_grouped(
    x_TD,
    slots_TK,
    weights_TK,
    gate_up,
    down,
    gate_up_bias_S2F,
    down_bias_SD,
    gate,
    rows: int | None = None,
    configs: tuple[GroupedConfig, GroupedConfig] | None = None,
):
    check(x_TD, slots_TK, weights_TK, gate_up.values, down.values, gate_up_bias_S2F, down_bias_SD)
    num_tokens, num_active = slots_TK.shape
    size, intermediate_size, num_slots = gate_up.in_features, down.in_features, down.num_slots
    num_pairs = num_tokens * num_active
    rows = rows or rows_per_block(num_pairs, num_slots, gate_up.format)
    pairs_BM, block_slots_B = sorted_pairs(slots_TK, num_slots, rows)

    def multiply(
        x: Tensor, weights: ExpertWeights, bias: Tensor | None, out: Tensor, is_gated: bool
    ) -> None:
        values, scale = as_inputs(x, weights.inputs)
        c = (
            configs[0 if is_gated else 1]
            if configs
            else grouped_config(
                weights.out_features, weights.in_features, bits_of(weights), rows, is_gated
            )
        )
        out_features, num_blocks = out.shape[1], len(block_slots_B)
        _grouped[(cdiv(out_features, c.outputs) * num_blocks,)](
            values, pointer(scale, values), weights.values, pointer(weights.scale, values), bias,
            weights_TK, out, pairs_BM, block_slots_B, values.stride(0), *scale_strides(scale),
            weights.values.stride(0), stride_of(weights.scale), num_pairs, num_blocks, num_slots,
            out_features, weights.in_features,
            gate.alpha, gate.shift, gate.limit, FORMAT=weights.format,
            PAIRS_PER_ROW=num_active if is_gated else 1, BLOCK_M=rows, BLOCK_N=c.outputs,
            BLOCK_I=c.depth, BAND=c.band, IS_GATED=is_gated, HAS_BIAS=bias is not None,
            ON_GPU=x.is_cuda, num_warps=c.num_warps, num_stages=c.num_stages, **launch_options(x),
        )  # fmt: skip

    h_PF = x_TD.new_empty((num_pairs, intermediate_size))
    multiply(x_TD, gate_up, gate_up_bias_S2F, h_PF, is_gated=True)
    y_PD = x_TD.new_empty((num_pairs, size))
    multiply(h_PF, down, down_bias_SD, y_PD, is_gated=False)
    masked_by = None if down.has_all else slots_TK
    return combine(y_PD.unsqueeze(0), num_tokens, x_TD.dtype, masked_by, num_slots)
