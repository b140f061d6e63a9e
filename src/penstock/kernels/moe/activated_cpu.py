"""Experts on a CPU: the activated ones, one after the other, each with all of its tokens.

Legend: T tokens, K experts of a token, P = T * K pairs of both, N tokens of one expert, D hidden
size, F features of an expert, S slots.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.kernels.gemm import CpuPackedWeight, linear, packed_linear
from penstock.kernels.gemm.fp8 import fp8_linear
from penstock.kernels.moe.gate import Gate, gated
from penstock.kernels.moe.weights import ExpertWeights, as_inputs

Matrices = Sequence[Tensor | CpuPackedWeight] | ExpertWeights  # one per slot, in whatever form


def activated_experts(
    x_TD: Tensor,
    slots_TK: Tensor,
    weights_TK: Tensor,
    gate_up: Matrices,
    down: Matrices,
    gate_up_bias_S2F: Tensor | None,
    down_bias_SD: Tensor | None,
    gate: Gate,
) -> Tensor:
    """As `experts`."""

    def expert(slot: int, x_ND: Tensor) -> Tensor:
        h_NF = gated(_linear(x_ND, gate_up, gate_up_bias_S2F, slot), gate)
        return _linear(h_NF, down, down_bias_SD, slot)

    num_tokens, num_active = slots_TK.shape
    num_slots = gate_up.num_slots if isinstance(gate_up, ExpertWeights) else len(gate_up)
    y_TD = torch.zeros_like(x_TD, dtype=torch.float32)
    if num_tokens == 1:
        for slot, weight in zip(slots_TK[0].tolist(), weights_TK[0].tolist(), strict=True):
            if slot < num_slots:
                y_TD.add_(expert(slot, x_TD), alpha=weight)
        return y_TD.to(x_TD.dtype)
    slots_P, order_P = slots_TK.flatten().sort(stable=True)
    tokens_P = order_P // num_active
    weights_P1 = weights_TK.flatten()[order_P].unsqueeze(1)
    slots, counts = torch.unique_consecutive(slots_P, return_counts=True)
    sizes = counts.tolist()
    for slot, tokens_N, weights_N1 in zip(
        slots.tolist(), tokens_P.split(sizes), weights_P1.split(sizes), strict=True
    ):
        if slot == num_slots:  # the last one
            break
        y_TD.index_add_(0, tokens_N, weights_N1 * expert(slot, x_TD[tokens_N]))
    return y_TD.to(x_TD.dtype)


def _linear(x_NI: Tensor, matrices: Matrices, bias_SO: Tensor | None, slot: int) -> Tensor:
    bias_O = None if bias_SO is None else bias_SO[slot]
    if not isinstance(matrices, ExpertWeights):
        matrix = matrices[slot]
        if isinstance(matrix, CpuPackedWeight):
            return packed_linear(x_NI, matrix, bias_O)
        return linear(x_NI, matrix, bias_O)
    if matrices.format == "plain":
        return linear(x_NI, matrices.values[slot], bias_O)
    values, scale = as_inputs(x_NI, matrices.inputs)
    if scale is None or matrices.scale is None:
        return linear(values, matrices.matrix(slot).to(x_NI.dtype), bias_O)
    return fp8_linear(
        values, scale, matrices.values[slot], matrices.scale[slot], bias_O, x_NI.dtype
    )
