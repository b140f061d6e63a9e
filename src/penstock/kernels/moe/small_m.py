"""Experts at small M on a GPU: each pair of a token and an expert is a GEMV, as fast as its weights
can be read.

A program reads rows of several matrices at once, so that much is in flight: those of the gate and
of the up projection, then those of all experts of a token.

Legend: T tokens, S slots, K experts of a token, P = T * K pairs, M matrices of a program, D hidden
size, F features of an expert.
"""

import functools
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels import tuned
from penstock.kernels.launch import jit
from penstock.kernels.moe.reference import experts
from penstock.kernels.moe.weights import ExpertWeights, as_inputs, pointer
from penstock.kernels.op import arch
from penstock.kernels.pdl import launch_options, let_next_start, wait_for_previous
from penstock.kernels.sizes import cdiv, next_power_of_2
from penstock.kernels.triton_math import gate_of

MAX_SMALL_M = 4  # tokens; more are faster on tensor cores


@dataclass(frozen=True, slots=True)
class SmallMConfig:
    """Launch config."""

    rows: int  # of each matrix that a program reads; a power of two, 128 at most
    tiles: int  # of 128 inputs, read at once
    num_warps: int


@triton.jit
def _gemv_rows(
    x_ptr, x_at, x_scale_ptr, x_scale_at, stride_x_scale, w_ptr, w_at, w_scale_ptr, w_scale_at,
    rows, is_row, is_matrix,
    FORMAT: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, M: tl.constexpr,
    TILES: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """[M, ROWS]: x[m] . w[m, rows]; `..._at` says where a matrix and what belongs to it begin.

    WAIT: x may not be there yet; the first weights are in flight before it is waited for (PDL).

    The compiler gives lanes the inputs, then from the left dimension on what remains: warps have
    the matrices, and a thread all rows of its inputs. So nothing passes through shared memory
    before the end, and of x a thread reads what it needs once.
    """
    NUM_TILES: tl.constexpr = (SIZE + 127) // 128
    lanes = tl.arange(0, 128)[None, None, None, :]
    x_ptr += x_at[None, :, None, None]
    w_ptr += w_at[None, :, None, None] + rows[None, None, :, None] * SIZE
    acc = tl.zeros((TILES, M, ROWS, 128), tl.float32)
    for step in tl.static_range((NUM_TILES + TILES - 1) // TILES):
        tiles = step * TILES + tl.arange(0, TILES)
        inputs = tiles[:, None, None, None] * 128 + lanes
        x_mask = is_matrix[None, :, None, None] & (inputs < SIZE)
        w_mask = x_mask & is_row[None, None, :, None]
        w = tl.load(w_ptr + inputs, mask=w_mask, other=0.0, eviction_policy="evict_first")
        if step == 0:
            wait_for_previous(WAIT)
        x = tl.load(x_ptr + inputs, mask=x_mask, other=0.0).to(tl.float32)
        if FORMAT == "fp8 blocks":  # a program's rows lie in one block
            mask = (tiles < NUM_TILES)[:, None] & is_matrix[None, :]
            at = w_scale_ptr + w_scale_at[None, :] + tiles[:, None]
            scale = tl.load(at, mask=mask, other=0.0)
            at = x_scale_ptr + x_scale_at[None, :] + tiles[:, None] * stride_x_scale
            x *= (scale * tl.load(at, mask=mask, other=0.0))[:, :, None, None]
        acc += w.to(tl.float32) * x
    y = tl.sum(tl.sum(acc, 3), 0)
    if FORMAT == "fp8 outputs":
        mask = is_matrix[:, None] & is_row[None, :]
        y *= tl.load(w_scale_ptr + w_scale_at[:, None] + rows[None, :], mask=mask, other=0.0)
        y *= tl.load(x_scale_ptr + x_scale_at, mask=is_matrix, other=0.0)[:, None]
    return y


@jit
def _gate_up_small_m(
    x_ptr, x_scale_ptr, slots_ptr, w_ptr, w_scale_ptr, bias_ptr, h_ptr,
    stride_x, stride_x_scale_t, stride_x_scale_g, stride_w, stride_w_scale, S, F, alpha, shift,
    limit,
    FORMAT: tl.constexpr, D: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr,
    TILES: tl.constexpr, HAS_ALL: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """h[pair, f] = gate(x[token] . w[slot, f], x[token] . w[slot, F + f]); one program per pair and
    ROWS features."""
    wait_for_previous(PDL)
    let_next_start(PDL)  # now slots are there for it, too
    pair, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * ROWS
    token, slot = pair // K, tl.load(slots_ptr + pair).to(tl.int64)
    if not HAS_ALL:  # noqa: SIM102  known when it is compiled
        if slot >= S:
            return
    features, parts = first + tl.arange(0, ROWS), tl.arange(0, 2)
    is_feature = features < F
    w_scale_at = slot * stride_w_scale
    if FORMAT == "fp8 blocks":
        w_scale_at += (parts * (F // 128) + first // 128) * ((D + 127) // 128)
    else:
        w_scale_at += parts * F
    y = _gemv_rows(
        x_ptr, token * stride_x + parts * 0, x_scale_ptr, token * stride_x_scale_t + parts * 0,
        stride_x_scale_g, w_ptr, slot * stride_w + parts * F * D, w_scale_ptr, w_scale_at,
        features, is_feature, parts < 2, FORMAT, D, ROWS, 2, TILES, False,
    )  # fmt: skip
    if HAS_BIAS:
        bias_at = bias_ptr + slot * 2 * F + parts[:, None] * F + features[None, :]
        y += tl.load(bias_at, mask=is_feature[None, :], other=0.0).to(tl.float32)
    gate, up = tl.split(tl.trans(y))
    h = gate_of(gate, up, alpha, shift, limit)
    tl.store(h_ptr + pair * F + features, h.to(h_ptr.dtype.element_ty), mask=is_feature)


@jit
def _down_small_m(
    h_ptr, h_scale_ptr, slots_ptr, weights_ptr, w_ptr, w_scale_ptr, bias_ptr, y_ptr,
    stride_h_scale_t, stride_h_scale_g, stride_w, stride_w_scale, S, D,
    FORMAT: tl.constexpr, F: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr, TILES: tl.constexpr, HAS_ALL: tl.constexpr, HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """y[token, d] = sum over its pairs of weight * (h[pair] . w[slot, d]); one program per token
    and ROWS channels. It waits for h alone: slots are older."""
    let_next_start(PDL)
    token, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * ROWS
    places = tl.arange(0, BLOCK_K)
    pairs, is_pair = token * K + places, places < K
    slots = tl.load(slots_ptr + pairs, mask=is_pair, other=0, cache_modifier=".cg").to(tl.int64)
    if not HAS_ALL:
        is_pair &= slots < S
    rows = first + tl.arange(0, ROWS)
    is_row = rows < D
    w_scale_at = slots * stride_w_scale
    if FORMAT == "fp8 blocks":
        w_scale_at += first // 128 * ((F + 127) // 128)
    y = _gemv_rows(
        h_ptr, pairs * F, h_scale_ptr, pairs * stride_h_scale_t, stride_h_scale_g,
        w_ptr, slots * stride_w, w_scale_ptr, w_scale_at,
        rows, is_row, is_pair, FORMAT, F, ROWS, BLOCK_K, TILES, PDL,
    )  # fmt: skip
    if HAS_BIAS:
        mask = is_pair[:, None] & is_row[None, :]
        bias_at = bias_ptr + slots[:, None] * D + rows[None, :]
        y += tl.load(bias_at, mask=mask, other=0.0).to(tl.float32)
    weights = tl.load(weights_ptr + pairs, mask=is_pair, other=0.0)
    y = tl.sum(y * weights[:, None], 0)
    tl.store(y_ptr + token * D + rows, y.to(y_ptr.dtype.element_ty), mask=is_row)


@functools.cache
def small_m_config(
    out_features: int, in_features: int, bits: int, num_matrices: int
) -> SmallMConfig:
    """A thread reads 16 bytes of each row at once, a warp `tiles` of one matrix.

    Where nothing was tuned, what is good on an H200 for four models. One token, us of both GEMMs
    (roofline): Qwen3-30B-A3B bf16 20.5 (16.7), Qwen3-Next fp8 12.8 (7.0), DeepSeek-R1 fp8
    92.1 (77.9), Qwen1.5-MoE bf16 20.4 (15.3).
    """
    is_down = num_matrices > 2
    usual = {
        8: SmallMConfig(4, 2, 4) if is_down else SmallMConfig(4, 4, 2),
        16: SmallMConfig(2, 2, 4) if is_down else SmallMConfig(1, 8, 4),
    }.get(bits, SmallMConfig(4, 1, min(num_matrices, 8)))
    return tuned.best("experts small_m", usual, outputs=out_features, inputs=in_features, bits=bits)


def scale_strides(scale: Tensor | None) -> tuple[int, int]:
    """From one token of an activation to the next, and from one group to the next."""
    if scale is None or scale.dim() == 1:
        return 0, 0
    return scale.stride(0), scale.stride(1)


def stride_of(scale: Tensor | None) -> int:
    return 0 if scale is None else scale.stride(0)


def check(x_TD: Tensor, *contiguous: Tensor | None) -> None:
    assert x_TD.stride(1) == 1, x_TD.stride()
    assert all(t is None or t.is_contiguous() for t in contiguous)


def bits_of(weights: ExpertWeights) -> int:
    return 4 if weights.format == "mxfp4" else 8 * weights.values.element_size()


@experts.impl(
    "triton few",
    needs=arch(80),
    fits=lambda x_TD, slots_TK, weights_TK, gate_up, *_: (
        0 < x_TD.shape[0] <= MAX_SMALL_M and gate_up.format != "mxfp4"
    ),
)
def experts_small_m(
    x_TD,
    slots_TK,
    weights_TK,
    gate_up,
    down,
    gate_up_bias_S2F,
    down_bias_SD,
    gate,
    configs: tuple[SmallMConfig, SmallMConfig] | None = None,
):
    check(x_TD, slots_TK, weights_TK, gate_up.values, down.values, gate_up_bias_S2F, down_bias_SD)
    num_tokens, num_active = slots_TK.shape
    size, intermediate_size = gate_up.in_features, down.in_features
    block_k = next_power_of_2(num_active)
    up_config, down_config = configs or (
        small_m_config(w.out_features, w.in_features, bits_of(w), num_matrices)
        for w, num_matrices in ((gate_up, 2), (down, block_k))
    )
    options: dict[str, Any] = {"K": num_active, **launch_options(x_TD)}
    x, x_scale = as_inputs(x_TD, gate_up.inputs)
    h_PF = x_TD.new_empty((num_tokens * num_active, intermediate_size))
    _gate_up_small_m[(len(h_PF), cdiv(intermediate_size, up_config.rows))](
        x, pointer(x_scale, x), slots_TK, gate_up.values, pointer(gate_up.scale, x),
        gate_up_bias_S2F, h_PF,
        x.stride(0), *scale_strides(x_scale), gate_up.values.stride(0), stride_of(gate_up.scale),
        gate_up.num_slots, intermediate_size, gate.alpha, gate.shift, gate.limit,
        FORMAT=gate_up.format, D=size, ROWS=up_config.rows, TILES=up_config.tiles,
        HAS_ALL=gate_up.has_all, HAS_BIAS=gate_up_bias_S2F is not None,
        num_warps=up_config.num_warps, **options,
    )  # fmt: skip
    h, h_scale = as_inputs(h_PF, down.inputs)
    y_TD = x_TD.new_empty((num_tokens, size))
    _down_small_m[(num_tokens, cdiv(size, down_config.rows))](
        h, pointer(h_scale, h), slots_TK, weights_TK, down.values, pointer(down.scale, h),
        down_bias_SD, y_TD,
        *scale_strides(h_scale), down.values.stride(0), stride_of(down.scale), down.num_slots, size,
        FORMAT=down.format, F=intermediate_size, BLOCK_K=block_k, ROWS=down_config.rows,
        TILES=down_config.tiles, HAS_ALL=down.has_all, HAS_BIAS=down_bias_SD is not None,
        num_warps=down_config.num_warps, **options,
    )  # fmt: skip
    return y_TD
