"""Small-M GEMM: up to 64 tokens times a large matrix on tensor cores. Still memory-bound.

The weight is the left operand, so its outputs fill the rows of an MMA tile and the tokens its
columns. A program has all inputs of its outputs: no split-K, no reduction.

Legend: T tokens, I inputs, O outputs, F features.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels import tuned
from penstock.kernels.device import num_sms, shared_bytes
from penstock.kernels.gemm.gated import MAX_TOKENS, MIN_SMALL_M_TOKENS
from penstock.kernels.launch import jit
from penstock.kernels.pdl import launch_options, let_next_start, wait_for_previous
from penstock.kernels.sizes import cdiv, next_power_of_2
from penstock.kernels.triton_dtypes import TRITON_DTYPES
from penstock.kernels.triton_math import dot, fp8_clamp, silu

_MIN_BYTES = 8 << 20  # of a smaller matrix cuBLAS takes as long


@dataclass(frozen=True, slots=True)
class SmallMGemmConfig:
    """Launch config."""

    outputs: int = 64  # of a program; 0: cuBLAS is faster
    row_bytes: int = 256  # of a row of the matrix read at once
    num_warps: int = 4
    num_stages: int = 6


USE_CUBLAS = SmallMGemmConfig(outputs=0)


def is_faster_than_cublas(num_tokens: int, weight_OI: Tensor) -> bool:
    """Or than torch's scaled GEMM, of FP8 weights."""
    if not MIN_SMALL_M_TOKENS <= num_tokens <= MAX_TOKENS or weight_OI.nbytes < _MIN_BYTES:
        return False
    config = small_m_gemm_config(
        *weight_OI.shape, weight_OI.element_size(), num_tokens, is_gated=False
    )
    return config.outputs > 0


@functools.cache
def small_m_gemm_config(
    out_features: int, in_features: int, element_bytes: int, num_tokens: int, is_gated: bool
) -> SmallMGemmConfig:
    tokens = max(16, next_power_of_2(num_tokens))
    return tuned.best(
        "small_m",
        _usual(out_features, in_features, tokens, is_gated),
        outputs=out_features,
        inputs=in_features,
        bits=8 * element_bytes,
        tokens=tokens,
    )


def _usual(
    out_features: int, in_features: int, num_tokens: int, is_gated: bool
) -> SmallMGemmConfig:
    """Where nothing was tuned, what is best on an H200 for most matrices of four models.

    Programs of 64 outputs must be one full wave with deep pipelines, or many waves, when shallow
    ones are enough; half a wave will do where K is small.
    """
    num_programs, sms = out_features // 64, num_sms()
    if is_gated:
        outputs = next(n for n in (64, 32, 16) if out_features >= 64 * 2 * n or n == 16)
        return SmallMGemmConfig(outputs=outputs, num_stages=4)
    if num_programs >= 8 * sms:
        return SmallMGemmConfig(outputs=128, num_stages=4)
    is_half = num_programs >= sms * 0.48 and in_features <= out_features and num_tokens <= 32
    is_once = num_programs >= sms * 0.84 or is_half
    return SmallMGemmConfig() if is_once and num_programs <= sms else USE_CUBLAS


@triton.jit
def _weights(w_rows, inputs, is_output, in_features, IS_EVEN: tl.constexpr):
    if IS_EVEN:
        w = tl.load(w_rows + inputs[None, :])
    else:
        mask = is_output[:, None] & (inputs < in_features)[None, :]
        w = tl.load(w_rows + inputs[None, :], mask=mask, other=0.0)
    return w


@triton.jit
def _epilogue(
    y, rows, is_output, x_scale_T, w_scale_ptr, bias_ptr, stride_w_scale,
    HAS_SCALES: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Scales and bias."""
    if HAS_SCALES:
        w_scale = tl.load(w_scale_ptr + rows * stride_w_scale, mask=is_output, other=0.0)
        y *= w_scale[:, None] * x_scale_T[None, :]
    if HAS_BIAS:
        y += tl.load(bias_ptr + rows, mask=is_output, other=0.0).to(tl.float32)[:, None]
    return y


@jit(do_not_specialize=["num_tokens"])
def _small_m_gemm(
    x_ptr, w_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, out_ptr, out_scale_ptr,
    num_tokens, out_features, in_features, stride_x, stride_w, stride_x_scale, stride_w_scale,
    BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
    HAS_SCALES: tl.constexpr, HAS_BIAS: tl.constexpr,
    IS_EVEN: tl.constexpr, IS_GATED: tl.constexpr, GEMM_DTYPE: tl.constexpr, ON_GPU: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out[t, o] = sum over i of x[t, i] * w[o, i] of BLOCK_O outputs.

    IS_EVEN: inputs and outputs are multiples of their blocks, no mask.
    IS_GATED: silu(out[t, o]) * out[t, out_features + o], both rounded to GEMM_DTYPE before.
    """
    let_next_start(PDL)
    outputs = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    is_output = outputs < out_features
    ups = out_features + outputs
    tokens = tl.arange(0, BLOCK_T)
    is_token = tokens < num_tokens
    w_rows = w_ptr + outputs.to(tl.int64)[:, None] * stride_w
    up_rows = w_ptr + ups.to(tl.int64)[:, None] * stride_w
    wait_for_previous(PDL)
    x_cols = x_ptr + tokens[None, :] * stride_x
    x_scale = tl.zeros((BLOCK_T,), tl.float32)
    if HAS_SCALES:
        x_scale = tl.load(x_scale_ptr + tokens * stride_x_scale, mask=is_token, other=0.0)
    acc = tl.zeros((BLOCK_O, BLOCK_T), tl.float32)
    up_acc = tl.zeros((BLOCK_O, BLOCK_T), tl.float32)
    for step in range(tl.cdiv(in_features, BLOCK_I)):
        inputs = step * BLOCK_I + tl.arange(0, BLOCK_I)
        mask = is_token[None, :]
        if not IS_EVEN:
            mask &= (inputs < in_features)[:, None]
        x = tl.load(x_cols + inputs[:, None], mask=mask, other=0.0)
        acc = dot(_weights(w_rows, inputs, is_output, in_features, IS_EVEN), x, acc, ON_GPU)
        if IS_GATED:
            w = _weights(up_rows, inputs, is_output, in_features, IS_EVEN)
            up_acc = dot(w, x, up_acc, ON_GPU)

    y = _epilogue(
        acc, outputs, is_output, x_scale, w_scale_ptr, bias_ptr, stride_w_scale,
        HAS_SCALES, HAS_BIAS,
    )  # fmt: skip
    if IS_GATED:
        up = _epilogue(
            up_acc, ups, is_output, x_scale, w_scale_ptr, bias_ptr, stride_w_scale,
            HAS_SCALES, HAS_BIAS,
        )  # fmt: skip
        y, up = y.to(GEMM_DTYPE).to(tl.float32), up.to(GEMM_DTYPE).to(tl.float32)
        y = silu(y) * up
    if out_ptr.dtype.element_ty.primitive_bitwidth == 8:
        y = fp8_clamp(y / tl.load(out_scale_ptr))
    to = tokens[None, :] * out_features + outputs[:, None]
    mask = is_output[:, None] & is_token[None, :]
    tl.store(out_ptr + to, y.to(out_ptr.dtype.element_ty), mask=mask)


def scale_strides(scale: Tensor | None, weight_scale: Tensor | None) -> tuple[int, int, int]:
    """From a token's scale to the next one's, to its next group's, and from output to output.

    Where scales are of blocks the last is from one row of blocks to the next.
    """
    by_token = scale is not None and scale.numel() > 1
    by_output = weight_scale is not None and weight_scale.numel() > 1
    return (
        scale.stride(0) if by_token else 0,  # type: ignore[union-attr]
        scale.stride(-1) if by_token else 0,  # type: ignore[union-attr]
        weight_scale.stride(0) if by_output else 0,  # type: ignore[union-attr]
    )


def small_m_gemm(
    x_TI: Tensor,
    scale: Tensor | None,
    weight_OI: Tensor,
    weight_scale: Tensor | None,
    bias_O: Tensor | None,
    dtype: torch.dtype,
    out_scale_1: Tensor | None = None,
    *,
    is_gated: bool = False,
    config: SmallMGemmConfig | None = None,
) -> Tensor:
    """x W^T + b in `dtype`, or as `gated_linear`. Scales: one, or one per row."""
    num_tokens, in_features = x_TI.shape
    out_features = weight_OI.shape[0] // (2 if is_gated else 1)
    assert x_TI.stride(1) == weight_OI.stride(1) == 1, (x_TI.stride(), weight_OI.stride())
    element_bytes = weight_OI.element_size()
    c = config or small_m_gemm_config(*weight_OI.shape, element_bytes, num_tokens, is_gated)
    block_i = c.row_bytes // element_bytes
    block_t = max(16, next_power_of_2(num_tokens))
    stage_bytes = c.row_bytes * (c.outputs * (2 if is_gated else 1) + block_t)
    out_dtype = dtype if out_scale_1 is None else torch.float8_e4m3fn
    out_TO = torch.empty((num_tokens, out_features), dtype=out_dtype, device=x_TI.device)
    by_token, _, by_output = scale_strides(scale, weight_scale)
    _small_m_gemm[(cdiv(out_features, c.outputs),)](
        x_TI, weight_OI, scale, weight_scale, bias_O, out_TO, out_scale_1,
        num_tokens, out_features, in_features, x_TI.stride(0), weight_OI.stride(0),
        by_token, by_output,
        BLOCK_T=block_t, BLOCK_O=c.outputs, BLOCK_I=block_i,
        HAS_SCALES=scale is not None, HAS_BIAS=bias_O is not None,
        IS_EVEN=in_features % block_i == out_features % c.outputs == 0,
        IS_GATED=is_gated, GEMM_DTYPE=TRITON_DTYPES[dtype], ON_GPU=x_TI.is_cuda,
        num_warps=c.num_warps, num_stages=min(c.num_stages, shared_bytes() // stage_bytes),
        **launch_options(x_TI),
    )  # fmt: skip
    return out_TO
