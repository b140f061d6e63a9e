"""One kernel for both: each program sums a row of all ranks' parts, which lie where they may.

Between ranks (`one_shot`) it first puts this rank's row where the others read it, and meets the
programs of the same row on the others, before and behind the sum. They meet by flags: a rank sets
its flag at each other rank and clears those that are set at its own. So a launch is the whole
all-reduce; in a CUDA graph, too, since every flag is clear behind it. A rank that never comes does
not keep the GPU for ever: the launch fails after `_MAX_POLLS`.

Legend: R ranks, T tokens, D hidden size.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.all_reduce.reference import sum_add_rms_norm, sum_parts
from penstock.kernels.launch import jit
from penstock.kernels.op import arch
from penstock.kernels.sizes import next_power_of_2

MAX_D = 16384  # one program holds a whole row in registers
# Some minutes, as NCCL would wait: a rank may be loading, or compiling.
_MAX_POLLS = 1 << 28


@triton.jit
def _change(flag_ptr, before: tl.constexpr, after: tl.constexpr, sem: tl.constexpr, max_polls):
    """Wait until the flag is `before`, and make it `after`."""
    polls = 0
    while tl.atomic_cas(flag_ptr, before, after, sem=sem, scope="sys") != before:
        polls += 1
        # Nobody may write there: the launch ends with an illegal address.
        nowhere = tl.full((), 0, tl.int64).to(tl.pointer_type(tl.int32))
        tl.store(nowhere, 0, mask=polls > max_polls)


@triton.jit
def _meet(flags_ptr, row, rank, max_polls, R: tl.constexpr):
    """What any of these programs stored before is seen by all of them behind it."""
    tl.debug_barrier()
    for other in tl.static_range(R):
        theirs = tl.load(flags_ptr + other).to(tl.pointer_type(tl.int32)) + row * R + rank
        _change(theirs, 0, 1, "release", max_polls)
    own = tl.load(flags_ptr + rank).to(tl.pointer_type(tl.int32)) + row * R
    for other in tl.static_range(R):
        _change(own + other, 1, 0, "acquire", max_polls)
    tl.debug_barrier()


@jit(do_not_specialize=["rank", "max_polls"])
def _one_shot(
    x_ptr, parts_ptr, flags_ptr, residual_ptr, weight_ptr, out_ptr, sum_ptr, rank, max_polls,
    stride_x, stride_residual, eps,
    R: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_NORM: tl.constexpr, IS_SHARED: tl.constexpr,
):  # fmt: skip
    """sum = sum over r of parts[r], with HAS_NORM plus residual, in fp32, rounded; out =
    rms_norm(sum). parts and flags are tables of addresses, one for each rank."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_D)
    inside = cols < D
    dtype = sum_ptr.dtype.element_ty
    if IS_SHARED:
        own = tl.load(parts_ptr + rank).to(tl.pointer_type(dtype)) + row * D
        tl.store(own + cols, tl.load(x_ptr + row * stride_x + cols, mask=inside), mask=inside)
        _meet(flags_ptr, row, rank, max_polls, R)
    total = tl.zeros([BLOCK_D], tl.float32)
    for other in tl.static_range(R):
        part = tl.load(parts_ptr + other).to(tl.pointer_type(dtype)) + row * D
        # Volatile: it may not come from a cache that knows nothing of the other GPUs.
        total += tl.load(part + cols, mask=inside, other=0.0, volatile=True).to(tl.float32)
    if IS_SHARED:
        _meet(flags_ptr, row, rank, max_polls, R)
    if HAS_NORM:
        residual = tl.load(residual_ptr + row * stride_residual + cols, mask=inside, other=0.0)
        total = (total + residual.to(tl.float32)).to(dtype)
        wide = total.to(tl.float32)
        weight = tl.load(weight_ptr + cols, mask=inside, other=0.0).to(tl.float32)
        out = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / D + eps) * weight
        tl.store(out_ptr + row * D + cols, out.to(dtype), mask=inside)
    tl.store(sum_ptr + row * D + cols, total.to(dtype), mask=inside)


def _launch(
    x_TD, parts_R, flags_R, residual_TD, weight_D, eps, rank, is_shared, max_polls=_MAX_POLLS
):
    num_tokens, size = x_TD.shape
    has_norm = residual_TD is not None
    sum_TD = torch.empty((num_tokens, size), dtype=x_TD.dtype, device=x_TD.device)
    out_TD = torch.empty_like(sum_TD) if has_norm else sum_TD
    block = next_power_of_2(size)
    if num_tokens:
        _one_shot[(num_tokens,)](
            x_TD, parts_R, flags_R, residual_TD if has_norm else x_TD,
            weight_D if has_norm else x_TD, out_TD, sum_TD, rank, max_polls,
            x_TD.stride(0), residual_TD.stride(0) if has_norm else 0, eps,
            R=parts_R.shape[0], D=size, BLOCK_D=block, HAS_NORM=has_norm, IS_SHARED=is_shared,
            num_warps=max(1, min(16, block // 512)),
        )  # fmt: skip
    return out_TD, sum_TD


def one_shot(
    x_TD: Tensor,
    parts_R: Tensor,
    flags_R: Tensor,
    rank: int,
    norm: tuple[Tensor, Tensor, float] | None,
    max_polls: int = _MAX_POLLS,
) -> tuple[Tensor, Tensor]:
    """(rms_norm(sum + residual), sum + residual) with `norm` (residual, weight, eps), else the sum,
    twice; sum is that of `x_TD` over the ranks.

    `parts_R`, `flags_R`: addresses of what all ranks see, for each rank T x D numbers, and T x R
    flags (int32) that are zero. `max_polls`: of each flag, after which the launch fails.
    """
    residual_TD, weight_D, eps = norm or (None, None, 0.0)
    return _launch(x_TD, parts_R, flags_R, residual_TD, weight_D, eps, rank, True, max_polls)


def _fits(parts_RTD: Tensor) -> bool:
    return parts_RTD.dim() == 3 and parts_RTD.shape[2] <= MAX_D


@sum_parts.impl("triton", needs=arch(80), fits=_fits)
def sum_parts_triton(parts_RTD):
    parts_R = _addresses(parts_RTD)
    return _launch(parts_RTD[0], parts_R, parts_R, None, None, 0.0, 0, False)[1]


@sum_add_rms_norm.impl(
    "triton",
    needs=arch(80),
    fits=lambda parts_RTD, residual_TD, weight_D, eps: _fits(parts_RTD),
)
def sum_add_rms_norm_triton(parts_RTD, residual_TD, weight_D, eps):
    parts_R = _addresses(parts_RTD)
    return _launch(parts_RTD[0], parts_R, parts_R, residual_TD, weight_D, eps, 0, False)


def _addresses(parts_RTD: Tensor) -> Tensor:
    assert parts_RTD.is_contiguous(), parts_RTD.stride()
    step = parts_RTD.stride(0) * parts_RTD.element_size()
    return torch.arange(parts_RTD.shape[0], device=parts_RTD.device) * step + parts_RTD.data_ptr()
