"""Split-K reduction of the experts' first GEMM, fused with the gate.

Legend: N splits, P rows, B blocks of M pairs, F features of an expert; 2F is the gate's features,
then the up projection's.
"""

import torch
import triton.language as tl
from torch import Tensor

from penstock.kernels.launch import jit
from penstock.kernels.moe.gate import Gate
from penstock.kernels.pdl import launch_options, let_next_start, wait_for_previous
from penstock.kernels.sizes import cdiv, next_power_of_2
from penstock.kernels.triton_math import gate_of

_BLOCK = 512


@jit(do_not_specialize=["num_rows", "num_pairs"])
def _gated_partials(
    parts_ptr, pairs_ptr, h_ptr, num_rows, num_pairs, F, alpha, shift, limit,
    N: tl.constexpr, BLOCK: tl.constexpr, HAS_PAIRS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """h[p, f] of a row and some features. HAS_PAIRS: rows are places of pairs, and those that have
    none are left as they are."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0)
    is_row = row >= 0
    if HAS_PAIRS:
        is_row = tl.load(pairs_ptr + row) < num_pairs
    if is_row:
        features = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = features < F
        gate, up = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
        for part in tl.static_range(N):
            at = parts_ptr + (part * num_rows + row).to(tl.int64) * (2 * F) + features
            gate += tl.load(at, mask=inside, other=0.0).to(tl.float32)
            up += tl.load(at + F, mask=inside, other=0.0).to(tl.float32)
        h = gate_of(gate, up, alpha, shift, limit).to(h_ptr.dtype.element_ty)
        tl.store(h_ptr + row.to(tl.int64) * F + features, h, mask=inside)


def gated_partials(
    parts_NP2F: Tensor,
    gate: Gate,
    dtype: torch.dtype,
    pairs_BM: Tensor | None = None,
    num_pairs: int = 0,
) -> Tensor:
    """[P, F]; with `pairs_BM` only of places that have one of `num_pairs`."""
    num_parts, num_rows, size = parts_NP2F.shape
    h_PF = torch.empty((num_rows, size // 2), dtype=dtype, device=parts_NP2F.device)
    block = min(_BLOCK, next_power_of_2(size // 2))
    _gated_partials[(num_rows, cdiv(size // 2, block))](
        parts_NP2F, h_PF if pairs_BM is None else pairs_BM, h_PF, num_rows, num_pairs, size // 2,
        gate.alpha, gate.shift, gate.limit, N=num_parts, BLOCK=block,
        HAS_PAIRS=pairs_BM is not None, num_warps=4, **launch_options(parts_NP2F),
    )  # fmt: skip
    return h_PF
