"""Whole numbers of 8 bits on a GPU: one launch to make them; a kernel or torch to multiply them.

Legend: T tokens, D channels, I inputs, O outputs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.int8.reference import int8_linear, int8_linear_int_mm, quantize_int8
from penstock.kernels.op import arch
from penstock.kernels.pdl import launch_options, let_next_start, wait_for_previous

_COLUMNS = 4096  # of a row in one pass
_MAX_TOKENS = 64  # of the kernel; more are quicker in torch's product
_INT_MM_MULTIPLE = 8  # of inputs and outputs, for that


@triton.jit
def _quantize(
    x_ptr, out_ptr, scale_ptr, stride_t, SIZE,
    IS_STATIC: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out = round(x / scale), one program per row; not static: scale = max(|row|) / 127."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride_t
    if IS_STATIC:
        scale = tl.load(scale_ptr)
    else:
        largest = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, SIZE, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + cols, mask=cols < SIZE, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.abs(x))
        scale = tl.div_rn(tl.maximum(tl.max(largest, axis=0), 1e-12), 127.0)
        tl.store(scale_ptr + row, scale)
    for start in range(0, SIZE, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + cols, mask=cols < SIZE, other=0.0).to(tl.float32)
        # Divided exactly, or numbers between two would fall to either. Adding and taking away
        # 1.5 * 2^23 leaves a whole number, the even one of two.
        x = tl.minimum(tl.maximum(tl.div_rn(x, tl.zeros_like(x) + scale), -127.0), 127.0)
        rounded = (x + 12582912.0) - 12582912.0
        tl.store(out_ptr + row * SIZE + cols, rounded.to(tl.int8), mask=cols < SIZE)


@quantize_int8.impl("triton", needs=arch(80), fits=lambda x_TD, scale_1: x_TD.dim() == 2)
def quantize_int8_triton(x_TD: Tensor, scale_1: Tensor | None) -> tuple[Tensor, Tensor]:
    assert x_TD.stride(1) == 1, x_TD.stride()
    num_rows, size = x_TD.shape
    out_TD = torch.empty((num_rows, size), dtype=torch.int8, device=x_TD.device)
    scale = scale_1
    if scale is None:
        scale = torch.empty((num_rows, 1), dtype=torch.float32, device=x_TD.device)
    if num_rows:
        block = min(triton.next_power_of_2(size), _COLUMNS)
        _quantize[(num_rows,)](
            x_TD, out_TD, scale, x_TD.stride(0), size, IS_STATIC=scale_1 is not None, BLOCK=block,
            num_warps=max(1, min(16, block // 512)), **launch_options(x_TD),
        )  # fmt: skip
    return out_TD, scale


@triton.jit(do_not_specialize=["num_tokens"])
def _int8_linear(
    x_ptr, scale_ptr, w_ptr, w_scale_ptr, bias_ptr, out_ptr,
    num_tokens, num_outputs, num_inputs, stride_x, stride_scale, stride_w_scale,
    HAS_BIAS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out[t, o] = scale[t] * w_scale[o] * sum over i of x[t, i] * w[o, i], plus bias[o]."""
    let_next_start(PDL)
    outputs = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    tokens = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_output, is_token = outputs < num_outputs, tokens < num_tokens
    w_rows = w_ptr + outputs.to(tl.int64)[:, None] * num_inputs
    wait_for_previous(PDL)
    x_cols = x_ptr + tokens.to(tl.int64)[None, :] * stride_x
    acc = tl.zeros((BLOCK_O, BLOCK_T), tl.int32)
    for start in range(0, num_inputs, BLOCK_I):
        inputs = start + tl.arange(0, BLOCK_I)
        is_input = inputs < num_inputs
        w = tl.load(w_rows + inputs[None, :], mask=is_output[:, None] & is_input[None, :], other=0)
        x = tl.load(x_cols + inputs[:, None], mask=is_token[None, :] & is_input[:, None], other=0)
        acc = tl.dot(w, x, acc, out_dtype=tl.int32)
    y = acc.to(tl.float32)
    y *= tl.load(scale_ptr + tokens * stride_scale, mask=is_token, other=0.0)[None, :]
    y *= tl.load(w_scale_ptr + outputs * stride_w_scale, mask=is_output, other=0.0)[:, None]
    if HAS_BIAS:
        y += tl.load(bias_ptr + outputs, mask=is_output, other=0.0).to(tl.float32)[:, None]
    to = tokens.to(tl.int64)[None, :] * num_outputs + outputs[:, None]
    mask = is_output[:, None] & is_token[None, :]
    tl.store(out_ptr + to, y.to(out_ptr.dtype.element_ty), mask=mask)


int8_linear.impl(
    "int_mm",
    needs=arch(80),
    fits=lambda x_TI, scale, weight_OI, *_: (
        x_TI.shape[0] > _MAX_TOKENS
        and weight_OI.shape[0] % _INT_MM_MULTIPLE == weight_OI.shape[1] % _INT_MM_MULTIPLE == 0
    ),
)(int8_linear_int_mm)


@int8_linear.impl("triton", needs=arch(80))
def int8_linear_triton(
    x_TI: Tensor,
    scale: Tensor,
    weight_OI: Tensor,
    weight_scale: Tensor,
    bias_O: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    assert x_TI.stride(1) == 1 and weight_OI.is_contiguous(), (x_TI.stride(), weight_OI.stride())
    num_tokens, num_inputs = x_TI.shape
    num_outputs = weight_OI.shape[0]
    out_TO = torch.empty((num_tokens, num_outputs), dtype=dtype, device=x_TI.device)
    if num_tokens == 0:
        return out_TO
    block_t = max(16, min(64, triton.next_power_of_2(num_tokens)))
    block_o = 32 if num_outputs <= 8192 else 64
    _int8_linear[(triton.cdiv(num_outputs, block_o), triton.cdiv(num_tokens, block_t))](
        x_TI, scale, weight_OI, weight_scale, bias_O, out_TO,
        num_tokens, num_outputs, num_inputs, x_TI.stride(0), int(scale.numel() > 1),
        int(weight_scale.numel() > 1), HAS_BIAS=bias_O is not None,
        BLOCK_T=block_t, BLOCK_O=block_o, BLOCK_I=256, num_warps=4, num_stages=4,
        **launch_options(x_TI),
    )  # fmt: skip
    return out_TO
