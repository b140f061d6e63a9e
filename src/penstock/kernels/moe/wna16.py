"""The meaning of products with coded weights: of a matrix, and of experts.

Legend: T tokens, I inputs, O outputs, S slots, K experts of a token, D hidden size, F features of
an expert.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.coded.weights import CodedWeight, unpack_coded
from penstock.kernels.moe.gate import Gate, gated
from penstock.kernels.op import op

_TRITON = "penstock.kernels.coded.triton"


@op(gpu_module=_TRITON)
def coded_linear(x_TI: Tensor, weight: CodedWeight, bias_O: Tensor | None) -> Tensor:
    """x W^T + b in fp32, back in x's dtype. Kernels may round numbers and their scales' products
    to 16 bits where x has no more."""
    return _linear32(x_TI, weight, bias_O).to(x_TI.dtype)


@op(gpu_module=_TRITON)
def coded_experts(
    x_TD: Tensor,
    slots_TK: Tensor,
    weights_TK: Tensor,
    gate_up: CodedWeight,
    down: CodedWeight,
    gate_up_bias_S2F: Tensor | None,
    down_bias_SD: Tensor | None,
    gate: Gate,
) -> Tensor:
    """Sum over a token's experts of weight * down(gated(gate_up(x))). Either product is rounded to
    x's dtype before the gate sees it, and the sum at the end."""
    y_TD = torch.zeros_like(x_TD, dtype=torch.float32)
    for slot in range(gate_up.num_slots):
        weight_T1 = (weights_TK * (slots_TK == slot)).sum(1, keepdim=True)
        biases = (None if b is None else b[slot] for b in (gate_up_bias_S2F, down_bias_SD))
        gate_up_bias, down_bias = biases
        h_T2F = _linear32(x_TD, gate_up.slot(slot), gate_up_bias).to(x_TD.dtype)
        h_TF = gated.reference(h_T2F, gate)
        y_TD += weight_T1 * _linear32(h_TF, down.slot(slot), down_bias)
    return y_TD.to(x_TD.dtype)


def _linear32(x_TI: Tensor, weight: CodedWeight, bias_O: Tensor | None) -> Tensor:
    y_TO = F.linear(x_TI.float(), unpack_coded(weight).values())
    return y_TO if bias_O is None else y_TO + bias_O.float()
