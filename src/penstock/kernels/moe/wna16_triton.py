"""Experts with low-bit weights on a GPU: the kernel of `gemm.wna16_triton` on pairs of a token and
an expert, in blocks of which each has one expert; on Hopper that of `moe.wna16_hopper`.

Legend: T tokens, S slots, K experts of a token, P = T * K pairs, B blocks of M pairs, D hidden
size, F intermediate size of an expert.
"""

from penstock.kernels.activation import silu_mul
from penstock.kernels.gemm.reduce import combine
from penstock.kernels.gemm.wna16_triton import MAX_BLOCK_T, multiply
from penstock.kernels.hopper import HopperKernels
from penstock.kernels.moe.align import rows_per_block, sorted_pairs
from penstock.kernels.moe.gate import SILU, gated
from penstock.kernels.moe.wna16 import weight_only_experts
from penstock.kernels.op import arch, hopper

_MAX_UNSORTED = 4  # tokens; so few seldom share an expert
_HOPPER = HopperKernels("penstock.kernels.moe.wna16_hopper", "experts with low-bit weights run")


@weight_only_experts.impl(
    "hopper",
    needs=hopper(),
    fits=lambda x_TD, slots_TK, weights_TK, gate_up, down, *_: (
        slots_TK.numel() > 0
        and (kernels := _HOPPER.module(x_TD)) is not None
        and kernels.fits(x_TD, gate_up, down)
    ),
)
def weight_only_experts_hopper(
    x_TD, slots_TK, weights_TK, gate_up, down, gate_up_bias_S2F, down_bias_SD, gate
):
    args = (slots_TK, weights_TK, gate_up, down, gate_up_bias_S2F, down_bias_SD, gate)
    y_TD = _HOPPER.result("experts", x_TD, *args)
    return weight_only_experts_triton(x_TD, *args) if y_TD is None else y_TD


@weight_only_experts.impl(
    "triton", needs=arch(80), fits=lambda x_TD, slots_TK, *_: slots_TK.numel() > 0
)
def weight_only_experts_triton(
    x_TD, slots_TK, weights_TK, gate_up, down, gate_up_bias_S2F, down_bias_SD, gate
):
    """Up to four tokens: a block for each pair. More: pairs are sorted by slot into blocks."""
    assert slots_TK.is_contiguous() and weights_TK.is_contiguous()
    num_tokens, num_pairs = x_TD.shape[0], slots_TK.numel()
    if num_tokens <= _MAX_UNSORTED:
        rows, pairs_BM, slots_B = 16, None, slots_TK.view(-1)
    else:
        rows = min(rows_per_block(num_pairs, gate_up.num_slots, gate_up.kind), MAX_BLOCK_T)
        pairs_BM, slots_B = sorted_pairs(slots_TK, gate_up.num_slots, rows)
    blocks = {"slots_B": slots_B, "pairs_BM": pairs_BM}
    parts = multiply(x_TD, gate_up, gate_up_bias_S2F, num_pairs, rows, None, **blocks)
    h_P2F = parts[0] if len(parts) == 1 else combine(parts, num_pairs, x_TD.dtype)
    h_PF = silu_mul(h_P2F) if gate == SILU else gated(h_P2F, gate)
    parts = multiply(
        h_PF, down, down_bias_SD, num_pairs, rows, None, **blocks, weights_P=weights_TK.view(-1)
    )
    return combine(parts, num_tokens, x_TD.dtype, slots_TK, down.num_slots)
