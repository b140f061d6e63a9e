"""What the parts of an expert's product have given, and a token's experts, added up.

Legend: T tokens, K experts of a token, P = T * K pairs, D hidden size, N parts of some inputs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.pdl import launch_options, let_next_start, wait_for_previous

_BLOCK = 1024


@triton.jit
def _sum_parts(
    parts_ptr, y_ptr, T, D, K: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """y[token] = sum of all parts of its pairs; one program per token and block of channels."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channels < D
    y = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(N):
        for k in tl.static_range(K):
            at = parts_ptr + ((part * T + token) * K + k) * D + channels
            y += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + token * D + channels, y.to(y_ptr.dtype.element_ty), mask=inside)


def sum_parts(parts_NPD: Tensor, num_tokens: int, dtype: torch.dtype) -> Tensor:
    num_parts, num_pairs, size = parts_NPD.shape
    y_TD = torch.empty((num_tokens, size), dtype=dtype, device=parts_NPD.device)
    block = min(_BLOCK, triton.next_power_of_2(size))
    _sum_parts[(num_tokens, triton.cdiv(size, block))](
        parts_NPD, y_TD, num_tokens, size, K=num_pairs // num_tokens, N=num_parts, BLOCK=block,
        num_warps=4, **launch_options(parts_NPD),
    )  # fmt: skip
    return y_TD
