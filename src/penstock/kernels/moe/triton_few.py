"""Experts of a few tokens on a GPU: each pair of a token and an expert is a product of its own, as
quick as the weights can be read.

Legend: T tokens, S slots, K experts of a token, P = T * K pairs, D hidden size, F features of an
expert; O outputs and I inputs of either product.
"""

import functools
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels import tuned
from penstock.kernels.moe.gate import Gate
from penstock.kernels.moe.reference import experts
from penstock.kernels.moe.triton_tiles import gate_of, halves, mxfp4_pairs, mxfp4_power
from penstock.kernels.moe.weights import ExpertWeights, as_inputs
from penstock.kernels.op import arch
from penstock.kernels.pdl import launch_options, let_next_start, wait_for_previous

MAX_FEW = 4  # tokens; more are quicker on tensor cores


@dataclass(frozen=True, slots=True)
class FewConfig:
    """Launch shape."""

    rows: int  # of the matrix that a program reads
    tiles: int  # of 128 inputs, read at once
    num_warps: int


@triton.jit
def _neighbours(x_ptr, numbers, SIZE: tl.constexpr):
    """x[2 * number] and the one behind it, 2^64 times as large: what they are multiplied with is
    2^-126 times too small, and products shall be of normal size."""
    mask = numbers < SIZE // 2
    if x_ptr.dtype.element_ty == tl.bfloat16:
        both_ptr = x_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
        low, high = halves(tl.load(both_ptr + numbers, mask=mask, other=0))
    else:
        low = tl.load(x_ptr + 2 * numbers, mask=mask, other=0.0).to(tl.float32)
        high = tl.load(x_ptr + 2 * numbers + 1, mask=mask, other=0.0).to(tl.float32)
    return low * 18446744073709551616.0, high * 18446744073709551616.0


@triton.jit
def _products(
    x_ptr, x_scale_ptr, stride_x_scale, w_ptr, w_scale_ptr, rows, is_row, num_outputs,
    FORMAT: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """[ROWS, TILES, lanes] whose sums are x . w[rows]; pointers are those of a token and a slot."""
    NUM_TILES: tl.constexpr = (SIZE + 127) // 128
    LANES: tl.constexpr = 16 if FORMAT == "mxfp4" else 128
    lanes = tl.arange(0, LANES)
    acc = tl.zeros((ROWS, TILES, LANES), tl.float32)
    for step in tl.static_range((NUM_TILES + TILES - 1) // TILES):
        tiles = step * TILES + tl.arange(0, TILES)
        in_matrix = is_row[:, None] & (tiles < NUM_TILES)[None, :]
        if FORMAT == "mxfp4":
            at = tiles[None, :] * num_outputs + rows[:, None]
            words_at = w_ptr + at[:, :, None] * LANES + lanes[None, None, :]
            words = tl.load(words_at, mask=in_matrix[:, :, None], other=0)
            scales = tl.load(w_scale_ptr + at, mask=in_matrix, other=0)
            scales = tl.broadcast_to(scales[:, :, None], words.shape)  # once, not as four powers
            for j in tl.static_range(4):
                numbers = tiles[:, None] * 64 + 16 * j + lanes[None, :]
                x_low, x_high = _neighbours(x_ptr, numbers, SIZE)
                low, high = halves(mxfp4_pairs(words, j))
                power = (mxfp4_power(scales, j, 62) << 23).to(tl.float32, bitcast=True)
                acc += (low * x_low[None, :, :] + high * x_high[None, :, :]) * power
        else:
            inputs = tiles[:, None] * 128 + lanes[None, :]
            x = tl.load(x_ptr + inputs, mask=inputs < SIZE, other=0.0).to(tl.float32)
            w_at = w_ptr + rows[:, None, None] * SIZE + inputs[None, :, :]
            mask = in_matrix[:, :, None] & (inputs < SIZE)[None, :, :]
            w = tl.load(w_at, mask=mask, other=0.0).to(tl.float32)
            if FORMAT == "fp8 blocks":
                x_scale = tl.load(x_scale_ptr + tiles * stride_x_scale, mask=tiles < NUM_TILES)
                at = (rows // 128)[:, None] * NUM_TILES + tiles[None, :]
                scale = tl.load(w_scale_ptr + at, mask=in_matrix, other=0.0)
                acc += w * x[None, :, :] * (scale * x_scale[None, :])[:, :, None]
            else:
                acc += w * x[None, :, :]
    if FORMAT == "fp8 outputs":
        scale = tl.load(w_scale_ptr + rows, mask=is_row, other=0.0) * tl.load(x_scale_ptr)
        acc *= scale[:, None, None]
    return acc


@triton.jit
def _gate_up_few(
    x_ptr, x_scale_ptr, slots_ptr, w_ptr, w_scale_ptr, bias_ptr, h_ptr,
    stride_x, stride_x_scale_t, stride_x_scale_g, stride_w, stride_w_scale, F, alpha, shift, limit,
    FORMAT: tl.constexpr, D: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr,
    TILES: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """h[pair, f] = gate(x[token] . w[slot, f], x[token] . w[slot, F + f]); one program per pair and
    ROWS rows: those of the gate and those of the up projection in turn."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    pair = tl.program_id(0).to(tl.int64)
    numbers = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    rows, is_row = numbers % 2 * F + numbers // 2, numbers // 2 < F
    slot = tl.load(slots_ptr + pair).to(tl.int64)
    products = _products(
        x_ptr + pair // K * stride_x, x_scale_ptr + pair // K * stride_x_scale_t, stride_x_scale_g,
        w_ptr + slot * stride_w, w_scale_ptr + slot * stride_w_scale, rows, is_row, 2 * F,
        FORMAT, D, ROWS, TILES,
    )  # fmt: skip
    y = tl.sum(tl.sum(products, 2), 1)
    if HAS_BIAS:
        y += tl.load(bias_ptr + slot * 2 * F + rows, mask=is_row, other=0.0).to(tl.float32)
    gate, up = tl.split(tl.reshape(y, (ROWS // 2, 2)))
    h = gate_of(gate, up, alpha, shift, limit)
    features = tl.program_id(1) * (ROWS // 2) + tl.arange(0, ROWS // 2)
    tl.store(h_ptr + pair * F + features, h.to(h_ptr.dtype.element_ty), mask=features < F)


@triton.jit
def _down_few(
    h_ptr, h_scale_ptr, slots_ptr, weights_ptr, w_ptr, w_scale_ptr, bias_ptr, y_ptr,
    stride_h_scale_t, stride_h_scale_g, stride_w, stride_w_scale, D,
    FORMAT: tl.constexpr, F: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr,
    TILES: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y[token, d] = sum over its pairs of weight * (h[pair] . w[slot, d]); one program per token
    and ROWS channels."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_row = rows < D
    LANES: tl.constexpr = 16 if FORMAT == "mxfp4" else 128
    total, y = tl.zeros((ROWS, TILES, LANES), tl.float32), tl.zeros((ROWS,), tl.float32)
    for k in range(K):
        pair = token * K + k
        slot = tl.load(slots_ptr + pair).to(tl.int64)
        weight = tl.load(weights_ptr + pair)
        total += weight * _products(
            h_ptr + pair * F, h_scale_ptr + pair * stride_h_scale_t, stride_h_scale_g,
            w_ptr + slot * stride_w, w_scale_ptr + slot * stride_w_scale, rows, is_row, D,
            FORMAT, F, ROWS, TILES,
        )  # fmt: skip
        if HAS_BIAS:
            bias = tl.load(bias_ptr + slot * D + rows, mask=is_row, other=0.0)
            y += weight * bias.to(tl.float32)
    y += tl.sum(tl.sum(total, 2), 1)
    tl.store(y_ptr + token * D + rows, y.to(y_ptr.dtype.element_ty), mask=is_row)


@functools.cache
def few_config(num_outputs: int, num_inputs: int, bits: int) -> FewConfig:
    """One warp has all rows of its inputs, so nothing passes through shared memory; a thread reads
    16 bytes of each row at once."""
    tiles = {4: 8, 8: 4, 16: 2}.get(bits, 1)
    usual = FewConfig(rows=2 if bits == 8 else 4, tiles=tiles, num_warps=1)
    return tuned.best("experts few", usual, outputs=num_outputs, inputs=num_inputs, bits=bits)


def scale_strides(scale: Tensor | None) -> tuple[int, int]:
    """From one token of an activation to the next, and from one group to the next."""
    if scale is None or scale.dim() == 1:
        return 0, 0
    return scale.stride(0), scale.stride(1)


def stride_of(scale: Tensor | None) -> int:
    return 0 if scale is None else scale.stride(0)


def pointer(scale: Tensor | None, other: Tensor) -> Tensor:
    """Kernels take a scale's address also where they do not read it."""
    return other if scale is None else scale


def check(x_TD: Tensor, *contiguous: Tensor | None) -> None:
    assert x_TD.stride(1) == 1, x_TD.stride()
    assert all(t is None or t.is_contiguous() for t in contiguous)


def bits_of(weights: ExpertWeights) -> int:
    return 4 if weights.format == "mxfp4" else 8 * weights.values.element_size()


@experts.impl("triton few", needs=arch(80), fits=lambda x_TD, *_: 0 < x_TD.shape[0] <= MAX_FEW)
def experts_few(
    x_TD: Tensor,
    slots_TK: Tensor,
    weights_TK: Tensor,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    gate_up_bias_S2F: Tensor | None,
    down_bias_SD: Tensor | None,
    gate: Gate,
    configs: tuple[FewConfig, FewConfig] | None = None,
) -> Tensor:
    check(x_TD, slots_TK, weights_TK, gate_up.values, down.values, gate_up_bias_S2F, down_bias_SD)
    num_tokens, num_active = slots_TK.shape
    size, num_features = gate_up.num_inputs, down.num_inputs
    up_config, down_config = configs or (
        few_config(w.num_outputs, w.num_inputs, bits_of(w)) for w in (gate_up, down)
    )
    options: dict[str, Any] = {"K": num_active, **launch_options(x_TD)}
    x, x_scale = as_inputs(x_TD, gate_up.inputs)
    h_PF = x_TD.new_empty((num_tokens * num_active, num_features))
    _gate_up_few[(len(h_PF), triton.cdiv(2 * num_features, up_config.rows))](
        x, pointer(x_scale, x), slots_TK, gate_up.values, pointer(gate_up.scale, x),
        gate_up_bias_S2F, h_PF,
        x.stride(0), *scale_strides(x_scale), gate_up.values.stride(0), stride_of(gate_up.scale),
        num_features, gate.alpha, gate.shift, gate.limit,
        FORMAT=gate_up.format, D=size, ROWS=up_config.rows, TILES=up_config.tiles,
        HAS_BIAS=gate_up_bias_S2F is not None, num_warps=up_config.num_warps, **options,
    )  # fmt: skip
    h, h_scale = as_inputs(h_PF, down.inputs)
    y_TD = x_TD.new_empty((num_tokens, size))
    _down_few[(num_tokens, triton.cdiv(size, down_config.rows))](
        h, pointer(h_scale, h), slots_TK, weights_TK, down.values, pointer(down.scale, h),
        down_bias_SD, y_TD,
        *scale_strides(h_scale), down.values.stride(0), stride_of(down.scale), size,
        FORMAT=down.format, F=num_features, ROWS=down_config.rows, TILES=down_config.tiles,
        HAS_BIAS=down_bias_SD is not None, num_warps=down_config.num_warps, **options,
    )  # fmt: skip
    return y_TD
