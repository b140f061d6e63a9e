"""`scaled_experts`: experts with block-scaled weights and quantized activations (NVFP4 with NVFP4,
MXFP4 with MXFP8).

Legend: T tokens, S slots, K experts of a token, D hidden size, F intermediate size of an expert; 2F
is the gate's features, then the up projection's.
"""

import torch
from torch import Tensor

from penstock.kernels.gemm.block_scaled import ScaledWeight, scaled_linear32
from penstock.kernels.moe.gate import Gate, gated
from penstock.kernels.op import op


@op(gpu_module="penstock.kernels.moe.block_scaled_triton")
def scaled_experts(
    x_TD: Tensor,
    slots_TK: Tensor,
    weights_TK: Tensor,
    gate_up: ScaledWeight,
    down: ScaledWeight,
    gate_up_bias_S2F: Tensor | None,
    down_bias_SD: Tensor | None,
    gate: Gate,
) -> Tensor:
    """Sum over a token's experts of weight * down(gated(gate_up(x))), the inputs of either GEMM
    quantized. The first one's result is rounded to x's dtype before the gate sees it."""
    y_TD = torch.zeros_like(x_TD, dtype=torch.float32)
    for slot in range(gate_up.num_slots):
        weight_T1 = (weights_TK * (slots_TK == slot)).sum(1, keepdim=True)
        biases = (None if b is None else b[slot] for b in (gate_up_bias_S2F, down_bias_SD))
        gate_up_bias, down_bias = biases
        h_T2F = scaled_linear32(x_TD, gate_up.slot(slot), gate_up_bias).to(x_TD.dtype)
        h_TF = gated.reference(h_T2F, gate)
        y_TD += weight_T1 * scaled_linear32(h_TF, down.slot(slot), down_bias)
    return y_TD.to(x_TD.dtype)
