"""FP8 GEMM on a GPU: GEMV, small-M kernel, torch's scaled GEMM, a Triton kernel for the rest.

Legend: T tokens, I inputs, O outputs, G groups.
"""

import functools

import torch
import triton.language as tl
from torch import Tensor

from penstock.kernels.device import probe
from penstock.kernels.gemm.fp8 import fp8_linear
from penstock.kernels.gemm.gated import MAX_GEMV_TOKENS
from penstock.kernels.gemm.gemv import gemv
from penstock.kernels.gemm.small_m import is_faster_than_cublas, small_m_gemm
from penstock.kernels.launch import jit
from penstock.kernels.op import arch
from penstock.kernels.quantize.reference import BLOCK
from penstock.kernels.sizes import cdiv, next_power_of_2
from penstock.kernels.triton_math import in_bands

_MAX_BLOCK_GEMV_TOKENS = 2  # with block scales, which take time of their own


fp8_linear.impl(
    "small_m",
    needs=arch(90),
    fits=lambda x_TI, scale, weight_OI, weight_scale, bias_O, dtype: (
        weight_scale.dim() == 1 and is_faster_than_cublas(x_TI.shape[0], weight_OI)
    ),
)(small_m_gemm)
fp8_linear.impl(
    "gemv",
    needs=arch(89),
    fits=lambda x_TI, scale, weight_OI, weight_scale, bias_O, dtype: (
        0 < x_TI.shape[0] <= (MAX_GEMV_TOKENS, _MAX_BLOCK_GEMV_TOKENS)[weight_scale.dim() - 1]
    ),
)(gemv)


@functools.cache
def _has_blockwise_scaled_mm() -> bool:
    """torch's scaled GEMM takes block scales on Hopper alone, since CUDA 12.9."""
    major, _, rest = (torch.version.cuda or "0.0").partition(".")
    return probe().arch == 90 and (int(major), int(rest.partition(".")[0])) >= (12, 9)


def _scaled_mm_fits(
    x_TI: Tensor,
    scale: Tensor,
    weight_OI: Tensor,
    weight_scale: Tensor,
    bias_O: Tensor | None,
    dtype: torch.dtype,
) -> bool:
    num_tokens, in_features = x_TI.shape
    out_features = weight_OI.shape[0]
    if not num_tokens or in_features % 16 or out_features % 16 or dtype == torch.float32:
        return False
    if weight_scale.dim() == 1:
        return scale.numel() == 1 == weight_scale.numel() or dtype == torch.bfloat16
    # Scales of activations are read four rows, those of weights four blocks at a time.
    is_whole = num_tokens % 4 == in_features % (4 * BLOCK) == 0
    return dtype == torch.bfloat16 and is_whole and _has_blockwise_scaled_mm()


@fp8_linear.impl("scaled_mm", needs=arch(90), fits=_scaled_mm_fits)
def fp8_linear_scaled_mm(x_TI, scale, weight_OI, weight_scale, bias_O, dtype):
    """torch's scaled GEMM. With per-tensor and per-row scales it accumulates in the tensor cores,
    which is fast; with block scales each 128 inputs are accumulated in fp32."""
    if weight_scale.dim() == 2:
        y_TO = torch._scaled_mm(
            x_TI, weight_OI.t(), _by_group(scale), weight_scale.t(), out_dtype=dtype
        )
        return y_TO if bias_O is None else y_TO.add_(bias_O)
    if scale.numel() == 1 == weight_scale.numel():
        return torch._scaled_mm(
            x_TI, weight_OI.t(), scale, weight_scale,
            bias=bias_O, out_dtype=dtype, use_fast_accum=True,
        )  # fmt: skip
    scale_T1 = scale.view(-1, 1).expand(x_TI.shape[0], 1).contiguous()
    weight_scale_1O = weight_scale.expand(weight_OI.shape[0]).contiguous().view(1, -1)
    y_TO = torch._scaled_mm(
        x_TI, weight_OI.t(), scale_T1, weight_scale_1O, out_dtype=dtype, use_fast_accum=True
    )
    return y_TO if bias_O is None else y_TO.add_(bias_O)


def _by_group(scale_TG: Tensor) -> Tensor:
    return scale_TG if scale_TG.stride(0) == 1 else scale_TG.t().contiguous().t()


@jit(do_not_specialize=["num_tokens", "stride_scale_g"])
def _fp8_linear(
    x_ptr, scale_ptr, weight_ptr, weight_scale_ptr, bias_ptr, out_ptr,
    num_tokens, out_features, in_features,
    stride_x, stride_scale_t, stride_scale_g, stride_weight_scale,
    HAS_BIAS: tl.constexpr, IN_BLOCKS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, GROUP_T: tl.constexpr,
):  # fmt: skip
    """out = (x * scale) (weight * weight_scale)^T + bias; one program per tile of the output.

    IN_BLOCKS (block scales): BLOCK_I is the width and BLOCK_O divides the height of a block, whose
    accumulator is scaled before it is added. Else scales are applied once, in the epilogue; the
    stride of a per-tensor scale is 0.
    """
    num_o = tl.cdiv(out_features, BLOCK_O)
    num_t = tl.cdiv(num_tokens, BLOCK_T)
    tile_t, tile_o = in_bands(tl.program_id(0), num_t, num_o, GROUP_T)

    tokens = (tile_t * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    outputs = (tile_o * BLOCK_O + tl.arange(0, BLOCK_O)).to(tl.int64)
    inputs = tl.arange(0, BLOCK_I)
    is_token, is_output = tokens < num_tokens, outputs < out_features
    x_ptr += tokens[:, None] * stride_x + inputs[None, :]
    weight_ptr += outputs[None, :] * in_features + inputs[:, None]
    scale_ptr += tokens * stride_scale_t
    acc = tl.zeros((BLOCK_T, BLOCK_O), tl.float32)
    for step in range(tl.cdiv(in_features, BLOCK_I)):
        is_input = step * BLOCK_I + inputs < in_features
        x = tl.load(x_ptr, mask=is_token[:, None] & is_input[None, :], other=0.0)
        weight = tl.load(weight_ptr, mask=is_input[:, None] & is_output[None, :], other=0.0)
        if IN_BLOCKS:
            scale = tl.load(scale_ptr + step * stride_scale_g, mask=is_token, other=0.0)
            block = tile_o * BLOCK_O // BLOCK_I * stride_weight_scale + step
            acc += tl.dot(x, weight) * (scale * tl.load(weight_scale_ptr + block))[:, None]
        else:
            acc = tl.dot(x, weight, acc)
        x_ptr += BLOCK_I
        weight_ptr += BLOCK_I
    if not IN_BLOCKS:
        scale = tl.load(scale_ptr, mask=is_token, other=0.0)
        acc *= scale[:, None]
        weight_scale_ptr += outputs * stride_weight_scale
        acc *= tl.load(weight_scale_ptr, mask=is_output, other=0.0)[None, :]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + outputs, mask=is_output, other=0.0).to(tl.float32)[None, :]
    out_ptr += tokens[:, None] * out_features + outputs[None, :]
    tl.store(out_ptr, acc.to(out_ptr.dtype.element_ty), mask=is_token[:, None] & is_output[None, :])


@fp8_linear.impl("triton", needs=arch(89))
def fp8_linear_triton(x_TI, scale, weight_OI, weight_scale, bias_O, dtype):
    assert x_TI.stride(1) == 1 and weight_OI.is_contiguous(), (x_TI.stride(), weight_OI.stride())
    num_tokens, in_features = x_TI.shape
    out_features = weight_OI.shape[0]
    in_blocks = weight_scale.dim() == 2
    out_TO = torch.empty((num_tokens, out_features), dtype=dtype, device=x_TI.device)
    if num_tokens == 0:
        return out_TO
    block_t = max(16, min(128, next_power_of_2(num_tokens)))
    block_o = 128 if block_t > 32 else 64
    grid = (cdiv(num_tokens, block_t) * cdiv(out_features, block_o),)
    _fp8_linear[grid](
        x_TI, scale, weight_OI, weight_scale, bias_O, out_TO,
        num_tokens, out_features, in_features, x_TI.stride(0),
        0 if scale.numel() == 1 else scale.stride(0), scale.stride(1) if in_blocks else 0,
        0 if weight_scale.numel() == 1 else weight_scale.stride(0),
        HAS_BIAS=bias_O is not None, IN_BLOCKS=in_blocks,
        BLOCK_T=block_t, BLOCK_O=block_o, BLOCK_I=BLOCK, GROUP_T=8,
        num_warps=8 if block_t == 128 else 4, num_stages=3 if block_t == 128 else 4,
    )  # fmt: skip
    return out_TO
