"""INT8 GEMV for one or two tokens: memory-bound, the time is that of reading the matrix once.

Many small programs without tensor cores; dp4a multiplies and accumulates four values. The first
weights are in flight before the previous kernel has finished (PDL).

Legend: T tokens, I inputs, O outputs; a word is four values.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.gemm.int8_epilogue import by_row, epilogue, load_scale_and_bias
from penstock.kernels.launch import jit
from penstock.kernels.pdl import launch_options, let_next_start, wait_for_previous
from penstock.kernels.sizes import cdiv, next_power_of_2

_WORD = 4  # values
_MAX_WORDS = 1024  # of a row read at once
_MAX_ROWS = 4  # of a program with one token


@dataclass(frozen=True, slots=True)
class GemvConfig:
    """Launch config."""

    rows: int  # outputs of a program
    words: int  # of a row read at once
    num_warps: int


@triton.jit
def _multiplied(w, x, acc, ON_GPU: tl.constexpr):
    """acc + the dot product of two words of four values."""
    if ON_GPU:
        acc = tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [w, x, acc],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        for left in tl.static_range(0, 32, 8):
            acc += ((w << left) >> 24) * ((x << left) >> 24)
    return acc


@triton.jit
def _weights(w_rows, words, is_output, num_words):
    mask = is_output & (words < num_words)
    return tl.load(w_rows + words, mask=mask, other=0, eviction_policy="evict_first")


@jit(do_not_specialize=["out_features"])
def _gemv(
    x_ptr, scale_ptr, w_ptr, w_scale_ptr, bias_ptr, out_ptr,
    out_features, num_words, stride_x, stride_scale, stride_w_scale,
    T: tl.constexpr, BLOCK_T: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    TILES: tl.constexpr, HAS_BIAS: tl.constexpr, ON_GPU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[t, o] = scale[t] * w_scale[o] * sum over i of x[t, i] * w[o, i] of ROWS outputs."""
    let_next_start(PDL)
    outputs = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tokens = tl.arange(0, BLOCK_T)[:, None, None]
    words = tl.arange(0, BLOCK)[None, None, :]
    rows, columns = tl.arange(0, BLOCK_T)[:, None], outputs[None, :]  # of what is written
    is_output = (outputs < out_features)[None, :, None]
    w_rows = w_ptr + (outputs.to(tl.int64) * num_words)[None, :, None]
    w = _weights(w_rows, words, is_output, num_words)
    w_scale, bias = load_scale_and_bias(
        w_scale_ptr, bias_ptr, columns, columns < out_features, stride_w_scale, HAS_BIAS
    )  # fmt: skip
    wait_for_previous(PDL)
    scale = tl.load(scale_ptr + rows * stride_scale, mask=rows < T, other=0.0)
    x_rows = x_ptr + tokens * stride_x
    x = tl.load(x_rows + words, mask=(tokens < T) & (words < num_words), other=0)
    acc = _multiplied(w, x, tl.zeros((BLOCK_T, ROWS, BLOCK), tl.int32), ON_GPU)
    for tile in tl.static_range(1, TILES):
        at = tile * BLOCK + words
        w = _weights(w_rows, at, is_output, num_words)
        x = tl.load(x_rows + at, mask=(tokens < T) & (at < num_words), other=0)
        acc = _multiplied(w, x, acc, ON_GPU)

    y = epilogue(tl.sum(acc, axis=2), scale, w_scale, bias, HAS_BIAS)
    mask = (rows < T) & (columns < out_features)
    to = out_ptr + rows * out_features + columns
    tl.store(to, y.to(out_ptr.dtype.element_ty), mask=mask)


def gemv_config(in_features: int, num_tokens: int) -> GemvConfig:
    """The best of 9 on an H200. us of 4096 x 14336 (outputs x inputs; roofline 13.0) and of
    8192 x 28672 (52.0): one token 14.2 and 53.4, two 15.9 and 55.7.
    """
    words = min(_MAX_WORDS, next_power_of_2(in_features // _WORD))
    rows = max(1, _MAX_ROWS // next_power_of_2(num_tokens))
    return GemvConfig(rows=rows, words=words, num_warps=4)


def gemv(
    x_TI: Tensor,
    scale: Tensor,
    weight_OI: Tensor,
    weight_scale: Tensor,
    bias_O: Tensor | None,
    dtype: torch.dtype,
    config: GemvConfig | None = None,
) -> Tensor:
    """As `int8_linear`; inputs are a multiple of 16."""
    assert weight_OI.is_contiguous(), weight_OI.stride()
    (num_tokens, in_features), out_features = x_TI.shape, weight_OI.shape[0]
    c = config or gemv_config(in_features, num_tokens)
    x_TW, weight_OW = (values.view(torch.int32) for values in (x_TI, weight_OI))
    out_TO = torch.empty((num_tokens, out_features), dtype=dtype, device=x_TI.device)
    num_words = in_features // _WORD
    _gemv[(cdiv(out_features, c.rows),)](
        x_TW, scale, weight_OW, weight_scale, bias_O, out_TO,
        out_features, num_words, x_TW.stride(0), by_row(scale), by_row(weight_scale),
        T=num_tokens, BLOCK_T=next_power_of_2(num_tokens), ROWS=c.rows, BLOCK=c.words,
        TILES=cdiv(num_words, c.words), HAS_BIAS=bias_O is not None, ON_GPU=x_TI.is_cuda,
        num_warps=c.num_warps, **launch_options(x_TI),
    )  # fmt: skip
    return out_TO
