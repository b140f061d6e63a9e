"""Experts with block-scaled weights on Blackwell: the kernel of `gemm.block_scaled_triton` on pairs
of a token and an expert, sorted into blocks of which each has one expert.

Legend: T tokens, S slots, K experts of a token, P = T * K pairs, B blocks of M pairs, D hidden
size, F intermediate size of an expert.
"""

from penstock.kernels.activation import silu_mul
from penstock.kernels.gemm.block_scaled_triton import MAX_BLOCK_T, multiply
from penstock.kernels.gemm.reduce import combine
from penstock.kernels.moe.align import rows_per_block, sorted_pairs
from penstock.kernels.moe.block_scaled import scaled_experts
from penstock.kernels.moe.gate import SILU, gated
from penstock.kernels.op import arch


@scaled_experts.impl(
    "triton", needs=arch(100), fits=lambda x_TD, slots_TK, *_: slots_TK.numel() > 0
)
def scaled_experts_triton(
    x_TD, slots_TK, weights_TK, gate_up, down, gate_up_bias_S2F, down_bias_SD, gate
):
    assert slots_TK.is_contiguous() and weights_TK.is_contiguous()
    num_tokens, num_pairs = x_TD.shape[0], slots_TK.numel()
    rows = min(rows_per_block(num_pairs, gate_up.num_slots, "fp4"), MAX_BLOCK_T)
    pairs_BM, slots_B = sorted_pairs(slots_TK, gate_up.num_slots, rows)
    blocks = {"slots_B": slots_B, "pairs_BM": pairs_BM}
    h_P2F = multiply(x_TD, gate_up, gate_up_bias_S2F, num_pairs, rows, **blocks)
    h_PF = silu_mul(h_P2F) if gate == SILU else gated(h_P2F, gate)
    y_PD = multiply(
        h_PF, down, down_bias_SD, num_pairs, rows, **blocks, weights_P=weights_TK.view(-1)
    )
    return combine(y_PD.unsqueeze(0), num_tokens, x_TD.dtype, slots_TK, down.num_slots)
