"""8-bit floats on a GPU: one launch to make them; torch's scaled product, or a kernel, to multiply.

Legend: T tokens, D channels, F features, I inputs, O outputs, G groups.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.carveout import beside_products, divide
from penstock.kernels.device import probe
from penstock.kernels.fp8.reference import (
    BLOCK,
    fp8_linear,
    quantize_fp8,
    rms_norm_fp8,
    silu_mul_fp8,
)
from penstock.kernels.gemm.few import MAX_GEMV_TOKENS
from penstock.kernels.gemm.skinny import gemv
from penstock.kernels.gemm.tiles import is_quicker, tiles
from penstock.kernels.op import arch
from penstock.kernels.pdl import launch_options, let_next_start, wait_for_previous

_FP8 = torch.float8_e4m3fn
_MAX_D = 16384  # of a norm: one program holds a whole row in registers
_COLUMNS = 1024  # of one program where columns do not depend on each other
_MAX_BLOCK_GEMV_TOKENS = 2  # with scales of blocks, which take time of their own
_ROW_COLUMNS = 4096  # of one pass where a program goes over its row


@triton.jit
def _rounded(x, scale):
    """x / scale as an 8-bit float; what is too large becomes the largest there is."""
    return tl.minimum(tl.maximum(x / scale, -448.0), 448.0).to(tl.float8e4nv)


@triton.jit
def _scale_of(amax):
    return tl.maximum(amax, 1e-12) / 448.0


@triton.jit
def _in_groups(x, scales_ptr, num_rows, row, first, num_groups, N: tl.constexpr, G: tl.constexpr):
    """N groups of G values: their scales stored behind `first`, and the values rounded."""
    x = tl.reshape(x, (N, G))
    scale = _scale_of(tl.max(tl.abs(x), axis=1))
    groups = first + tl.arange(0, N)
    tl.store(scales_ptr + groups.to(tl.int64) * num_rows + row, scale, mask=groups < num_groups)
    return tl.reshape(_rounded(x, scale[:, None]), (N * G,))


@triton.jit
def _load(x_ptr, cols, inside, SIZE, GATED: tl.constexpr):
    """x, or silu(gate) * up where x is both, in fp32."""
    x = tl.load(x_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(x_ptr + SIZE + cols, mask=inside, other=0.0).to(tl.float32)
        x = x / (1.0 + tl.exp(-x)) * up
    return x


@triton.jit(do_not_specialize=["num_rows"])
def _quantize(
    x_ptr, out_ptr, scales_ptr, num_rows, stride_t, SIZE,
    GATED: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per (row, block of columns). GROUP 0: by the one scale there is; else each GROUP
    columns get a scale."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < SIZE
    x = _load(x_ptr + row * stride_t, cols, inside, SIZE, GATED)
    if GROUP == 0:
        out = _rounded(x, tl.load(scales_ptr))
    else:
        first = tl.program_id(1) * (BLOCK // GROUP)
        out = _in_groups(x, scales_ptr, num_rows, row, first, SIZE // GROUP, BLOCK // GROUP, GROUP)
    tl.store(out_ptr + row * SIZE + cols, out, mask=inside)


@triton.jit
def _quantize_rows(
    x_ptr, out_ptr, scales_ptr, stride_t, SIZE,
    GATED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """scale = max(|row|) / 448. One program goes over its row twice; the second time it is near."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride_t
    largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, SIZE, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, tl.abs(_load(x_ptr, cols, cols < SIZE, SIZE, GATED)))
    scale = _scale_of(tl.max(largest, axis=0))
    tl.store(scales_ptr + row, scale)
    for start in range(0, SIZE, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = _load(x_ptr, cols, cols < SIZE, SIZE, GATED)
        tl.store(out_ptr + row * SIZE + cols, _rounded(x, scale), mask=cols < SIZE)


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm(
    x_ptr, residual_ptr, weight_ptr, out_ptr, scales_ptr, sum_ptr, num_rows,
    stride_x, stride_residual, eps,
    HAS_RESIDUAL: tl.constexpr, IS_STATIC: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """sum = x + residual, rounded to its dtype; out = rms_norm(sum), quantised; one per row."""
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < D
    weight = tl.load(weight_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    if IS_STATIC:
        scale = tl.load(scales_ptr)
    wait_for_previous(PDL)
    total = tl.load(x_ptr + row * stride_x + cols, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row * stride_residual + cols, mask=inside, other=0.0)
        rounded = (total + residual.to(tl.float32)).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * D + cols, rounded, mask=inside)
        total = rounded.to(tl.float32)
    normed = total * tl.rsqrt(tl.sum(total * total, axis=0) / D + eps) * weight
    if IS_STATIC:
        out = _rounded(normed, scale)
    elif GROUP == 0:
        scale = _scale_of(tl.max(tl.abs(normed), axis=0))
        tl.store(scales_ptr + row, scale)
        out = _rounded(normed, scale)
    else:
        out = _in_groups(normed, scales_ptr, num_rows, row, 0, D // GROUP, BLOCK // GROUP, GROUP)
    tl.store(out_ptr + row * D + cols, out, mask=inside)


def _scales(x: Tensor, scale_1: Tensor | None, group: int, size: int) -> Tensor:
    """Where the scales go: nothing is written to a given one."""
    if scale_1 is not None:
        return scale_1
    assert group == 0 or size % group == 0, (size, group)
    shape = (size // group if group else 1, x.shape[0])
    return torch.empty(shape, dtype=torch.float32, device=x.device).t()


def _num_warps(num_elements: int) -> int:
    """16 elements per thread, one to 16 warps."""
    return max(1, min(16, num_elements // (32 * 16)))


def _quantized(
    x: Tensor, scale_1: Tensor | None, group: int, size: int, gated: bool
) -> tuple[Tensor, Tensor]:
    assert x.stride(1) == 1, x.stride()
    num_rows = x.shape[0]
    out = torch.empty((num_rows, size), dtype=_FP8, device=x.device)
    scales = _scales(x, scale_1, group, size)
    if num_rows == 0:
        return out, scales
    if scale_1 is None and group == 0:
        block = min(triton.next_power_of_2(size), _ROW_COLUMNS)
        kernel = _quantize_rows[(num_rows,)](
            x, out, scales, x.stride(0), size,
            GATED=gated, BLOCK=block, num_warps=_num_warps(block), **launch_options(x),
        )  # fmt: skip
    else:
        kernel = _quantize[(num_rows, triton.cdiv(size, _COLUMNS))](
            x, out, scales, num_rows, x.stride(0), size,
            GATED=gated, GROUP=0 if scale_1 is not None else group, BLOCK=_COLUMNS, num_warps=4,
            **launch_options(x),
        )  # fmt: skip
    divide(kernel, beside_products(num_rows))
    return out, scales


def _fits_groups(group: int) -> bool:
    return group in (0, 32, 64, 128)


@quantize_fp8.impl(
    "triton",
    needs=arch(89),
    fits=lambda x_TD, scale_1, group: x_TD.dim() == 2 and _fits_groups(group),
)
def quantize_fp8_triton(x_TD: Tensor, scale_1: Tensor | None, group: int) -> tuple[Tensor, Tensor]:
    return _quantized(x_TD, scale_1, group, x_TD.shape[1], gated=False)


@silu_mul_fp8.impl(
    "triton",
    needs=arch(89),
    fits=lambda x_T2F, scale_1, group: x_T2F.dim() == 2 and _fits_groups(group),
)
def silu_mul_fp8_triton(x_T2F: Tensor, scale_1: Tensor | None, group: int) -> tuple[Tensor, Tensor]:
    return _quantized(x_T2F, scale_1, group, x_T2F.shape[1] // 2, gated=True)


@rms_norm_fp8.impl(
    "triton",
    needs=arch(89),
    fits=lambda x_TD, residual_TD, weight_D, eps, scale_1, group: (
        x_TD.dim() == 2 and x_TD.shape[1] <= _MAX_D and _fits_groups(group)
    ),
)
def rms_norm_fp8_triton(
    x_TD: Tensor,
    residual_TD: Tensor | None,
    weight_D: Tensor,
    eps: float,
    scale_1: Tensor | None,
    group: int,
) -> tuple[Tensor, Tensor, Tensor]:
    assert x_TD.stride(1) == 1 and (residual_TD is None or residual_TD.stride(1) == 1)
    num_rows, size = x_TD.shape
    out_TD = torch.empty((num_rows, size), dtype=_FP8, device=x_TD.device)
    scales = _scales(x_TD, scale_1, group, size)
    sum_TD = x_TD
    if residual_TD is not None:
        sum_TD = torch.empty_like(x_TD, memory_format=torch.contiguous_format)
    if num_rows:
        block = max(triton.next_power_of_2(size), group)
        kernel = _rms_norm[(num_rows,)](
            x_TD, residual_TD, weight_D, out_TD, scales, sum_TD, num_rows,
            x_TD.stride(0), 0 if residual_TD is None else residual_TD.stride(0), eps,
            HAS_RESIDUAL=residual_TD is not None, IS_STATIC=scale_1 is not None, GROUP=group,
            D=size, BLOCK=block, num_warps=_num_warps(block), **launch_options(x_TD),
        )  # fmt: skip
        divide(kernel, beside_products(num_rows))
    return out_TD, scales, sum_TD


fp8_linear.impl(
    "tiles",
    needs=arch(90),
    fits=lambda x_TI, scale, weight_OI, weight_scale, bias_O, dtype: (
        weight_scale.dim() == 1 and is_quicker(x_TI.shape[0], weight_OI)
    ),
)(tiles)
fp8_linear.impl(
    "gemv",
    needs=arch(89),
    fits=lambda x_TI, scale, weight_OI, weight_scale, bias_O, dtype: (
        0 < x_TI.shape[0] <= (MAX_GEMV_TOKENS, _MAX_BLOCK_GEMV_TOKENS)[weight_scale.dim() - 1]
    ),
)(gemv)


@functools.cache
def _has_block_products() -> bool:
    """Of torch's product: block scales exist on Hopper alone, since CUDA 12.9."""
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
    num_tokens, num_inputs = x_TI.shape
    num_outputs = weight_OI.shape[0]
    if not num_tokens or num_inputs % 16 or num_outputs % 16 or dtype == torch.float32:
        return False
    if weight_scale.dim() == 1:
        return scale.numel() == 1 == weight_scale.numel() or dtype == torch.bfloat16
    # Scales of activations are read four rows, those of weights four blocks at a time.
    is_whole = num_tokens % 4 == num_inputs % (4 * BLOCK) == 0
    return dtype == torch.bfloat16 and is_whole and _has_block_products()


@fp8_linear.impl("scaled_mm", needs=arch(90), fits=_scaled_mm_fits)
def fp8_linear_scaled_mm(
    x_TI: Tensor,
    scale: Tensor,
    weight_OI: Tensor,
    weight_scale: Tensor,
    bias_O: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """torch's product. Sums of whole-tensor and row scales stay in the tensor cores, which is fast;
    with block scales every 128 products are added up in fp32."""
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


@triton.jit(do_not_specialize=["num_tokens", "stride_scale_g"])
def _fp8_linear(
    x_ptr, scale_ptr, weight_ptr, weight_scale_ptr, bias_ptr, out_ptr,
    num_tokens, num_outputs, num_inputs,
    stride_x, stride_scale_t, stride_scale_g, stride_weight_scale,
    HAS_BIAS: tl.constexpr, IN_BLOCKS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, GROUP_T: tl.constexpr,
):  # fmt: skip
    """out = (x * scale) (weight * weight_scale)^T + bias; one program per tile of the output.

    IN_BLOCKS: BLOCK_I is the width and BLOCK_O divides the height of a block; its products are
    scaled before they are added. Else scales are applied once, at the end; the stride of one scale
    for all is 0. Programs follow each other down GROUP_T tiles of tokens, which share weights.
    """
    num_o = tl.cdiv(num_outputs, BLOCK_O)
    num_t = tl.cdiv(num_tokens, BLOCK_T)
    band = tl.program_id(0) // (GROUP_T * num_o)
    height = tl.minimum(num_t - band * GROUP_T, GROUP_T)
    within = tl.program_id(0) % (GROUP_T * num_o)
    tile_t, tile_o = band * GROUP_T + within % height, within // height

    tokens = (tile_t * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    outputs = (tile_o * BLOCK_O + tl.arange(0, BLOCK_O)).to(tl.int64)
    inputs = tl.arange(0, BLOCK_I)
    is_token, is_output = tokens < num_tokens, outputs < num_outputs
    x_ptr += tokens[:, None] * stride_x + inputs[None, :]
    weight_ptr += outputs[None, :] * num_inputs + inputs[:, None]
    scale_ptr += tokens * stride_scale_t
    acc = tl.zeros((BLOCK_T, BLOCK_O), tl.float32)
    for step in range(tl.cdiv(num_inputs, BLOCK_I)):
        is_input = step * BLOCK_I + inputs < num_inputs
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
    out_ptr += tokens[:, None] * num_outputs + outputs[None, :]
    tl.store(out_ptr, acc.to(out_ptr.dtype.element_ty), mask=is_token[:, None] & is_output[None, :])


@fp8_linear.impl("triton", needs=arch(89))
def fp8_linear_triton(
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
    in_blocks = weight_scale.dim() == 2
    out_TO = torch.empty((num_tokens, num_outputs), dtype=dtype, device=x_TI.device)
    if num_tokens == 0:
        return out_TO
    block_t = max(16, min(128, triton.next_power_of_2(num_tokens)))
    block_o = 128 if block_t > 32 else 64
    grid = (triton.cdiv(num_tokens, block_t) * triton.cdiv(num_outputs, block_o),)
    _fp8_linear[grid](
        x_TI, scale, weight_OI, weight_scale, bias_O, out_TO,
        num_tokens, num_outputs, num_inputs, x_TI.stride(0),
        0 if scale.numel() == 1 else scale.stride(0), scale.stride(1) if in_blocks else 0,
        0 if weight_scale.numel() == 1 else weight_scale.stride(0),
        HAS_BIAS=bias_O is not None, IN_BLOCKS=in_blocks,
        BLOCK_T=block_t, BLOCK_O=block_o, BLOCK_I=BLOCK, GROUP_T=8,
        num_warps=8 if block_t == 128 else 4, num_stages=3 if block_t == 128 else 4,
    )  # fmt: skip
    return out_TO
