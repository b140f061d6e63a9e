"""Adding the shared expert's output, its gate included, in one launch.

Legend: T tokens, D hidden size.
"""

import triton.language as tl

from penstock.kernels.launch import jit
from penstock.kernels.moe.reference import add_shared
from penstock.kernels.op import arch
from penstock.kernels.pdl import launch_options, let_next_start, wait_for_previous
from penstock.kernels.sizes import cdiv, next_power_of_2
from penstock.kernels.triton_math import sigmoid

_BLOCK = 1024  # channels of a program


@jit
def _add_shared(
    y_ptr, shared_ptr, x_ptr, gate_ptr, out_ptr, stride_y, stride_shared, stride_x,
    D: tl.constexpr, BLOCK: tl.constexpr, HAS_GATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[t] = y[t] + shared[t] * sigmoid(x[t] . gate); one program per token and block of
    channels, each with its own dot product."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channels < D
    y = tl.load(y_ptr + token * stride_y + channels, mask=inside, other=0.0).to(tl.float32)
    shared = tl.load(shared_ptr + token * stride_shared + channels, mask=inside, other=0.0)
    shared = shared.to(tl.float32)
    if HAS_GATE:
        acc = tl.zeros((BLOCK,), tl.float32)
        for step in tl.static_range((D + BLOCK - 1) // BLOCK):
            inputs = step * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + token * stride_x + inputs, mask=inputs < D, other=0.0)
            gate = tl.load(gate_ptr + inputs, mask=inputs < D, other=0.0)
            acc += x.to(tl.float32) * gate.to(tl.float32)
        shared = shared * sigmoid(tl.sum(acc, 0))
    out_ptr += token * D + channels
    tl.store(out_ptr, (y + shared).to(out_ptr.dtype.element_ty), mask=inside)


@add_shared.impl("triton", needs=arch(80), fits=lambda y_TD, *_: y_TD.shape[0] > 0)
def add_shared_triton(y_TD, shared_TD, x_TD, gate_1D):
    assert y_TD.stride(1) == shared_TD.stride(1) == x_TD.stride(1) == 1
    assert gate_1D is None or gate_1D.is_contiguous()
    num_tokens, size = y_TD.shape
    out_TD = y_TD.new_empty((num_tokens, size))
    block = min(_BLOCK, next_power_of_2(size))
    _add_shared[(num_tokens, cdiv(size, block))](
        y_TD, shared_TD, x_TD, gate_1D, out_TD,
        y_TD.stride(0), shared_TD.stride(0), x_TD.stride(0),
        D=size, BLOCK=block, HAS_GATE=gate_1D is not None, num_warps=4, **launch_options(y_TD),
    )  # fmt: skip
    return out_TD
