"""`combine`: the split-K reduction, and the sum of a token's experts, in one kernel.

Legend: T tokens, S slots, K experts of a token, P = T * K pairs, D hidden size, N splits of the
inputs.
"""

import torch
import triton.language as tl
from torch import Tensor

from penstock.kernels.launch import jit
from penstock.kernels.pdl import launch_options, let_next_start, wait_for_previous
from penstock.kernels.sizes import cdiv, next_power_of_2

_BLOCK = 1024


@jit
def _combine(
    parts_ptr, slots_ptr, y_ptr, T, S, D, K: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
    HAS_SLOTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y[token] = sum of all splits of its pairs; one program per token and block of channels.

    HAS_SLOTS: nothing was written for pairs of slot S, so what is read there does not count.
    """
    let_next_start(PDL)
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channels < D
    y = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(N):
        for k in tl.static_range(K):
            at = parts_ptr + ((part * T + token) * K + k) * D + channels
            part_of_y = tl.load(at, mask=inside, other=0.0).to(tl.float32)
            if HAS_SLOTS:
                slot = tl.load(slots_ptr + token * K + k)
                part_of_y = tl.where(slot < S, part_of_y, 0.0)
            y += part_of_y
    tl.store(y_ptr + token * D + channels, y.to(y_ptr.dtype.element_ty), mask=inside)


def combine(
    parts_NPD: Tensor,
    num_tokens: int,
    dtype: torch.dtype,
    slots_TK: Tensor | None = None,
    num_slots: int = 0,
) -> Tensor:
    """[T, D]; with `slots_TK` without the pairs whose slot is none of `num_slots`."""
    num_parts, num_pairs, size = parts_NPD.shape
    y_TD = torch.empty((num_tokens, size), dtype=dtype, device=parts_NPD.device)
    block = min(_BLOCK, next_power_of_2(size))
    _combine[(num_tokens, cdiv(size, block))](
        parts_NPD, slots_TK, y_TD, num_tokens, num_slots, size, K=num_pairs // num_tokens,
        N=num_parts, BLOCK=block, HAS_SLOTS=slots_TK is not None, num_warps=4,
        **launch_options(parts_NPD),
    )  # fmt: skip
    return y_TD
