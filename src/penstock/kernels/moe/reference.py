"""References of routing, of the experts and of adding the shared expert; `experts` on a CPU.

Experts are chosen by number and computed by slot: the index of an expert in the stacked weights.
Both are the same until experts are moved or repeated to balance their load, or lie on several
devices: slot S, behind the last one, says that an expert is elsewhere and adds nothing here.

Legend: T tokens, E experts, S slots, K experts of a token, G groups of experts, D hidden size,
F features of an expert; 2F is the gate's features, then the up projection's.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.formats import PLAIN
from penstock.kernels.gemm.fp8 import fp8_linear
from penstock.kernels.moe.activated_cpu import activated_experts
from penstock.kernels.moe.gate import Gate, gated
from penstock.kernels.moe.weights import ExpertWeights, as_inputs
from penstock.kernels.op import cpu, op
from penstock.kernels.quantize import quantize_fp8

_TINY = 1e-20  # keeps a sum of scores from zero


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How a token's experts follow from its scores."""

    num_active: int  # experts of a token
    score: str = "softmax"  # over all experts, or "sigmoid" of each
    renormalize: bool = False  # the weights of the chosen ones sum to one
    scale: float = 1.0  # of the weights, after that
    num_groups: int = 1  # experts are chosen from the best `num_active_groups` of these
    num_active_groups: int = 1
    num_best: int = 2  # a group is as good as the sum of its best experts, so many of them


@op(gpu_module="penstock.kernels.moe.routing")
def router_logits(x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None) -> Tensor:
    """x W^T + b in fp32, whatever the dtypes are: a small difference may choose another expert."""
    return F.linear(x_TD.float(), weight_ED.float(), bias_E)


@op(gpu_module="penstock.kernels.moe.routing")
def route(
    logits_TE: Tensor,
    routing: Routing,
    correction_E: Tensor | None,
    slot_of_E: Tensor,
    load_S: Tensor,
) -> tuple[Tensor, Tensor]:
    """(slots_TK int32, weights_TK float32) of each token's experts, best first.

    `correction_E` counts for the choice, not for the weights. `load_S` (int64) is increased by the
    number of tokens that chose each slot.
    """
    scores_TE = logits_TE.float()
    scores_TE = scores_TE.sigmoid() if routing.score == "sigmoid" else scores_TE.softmax(-1)
    rank_TE = scores_TE if correction_E is None else scores_TE + correction_E
    if routing.num_active_groups < routing.num_groups:
        rank_TGE = rank_TE.unflatten(1, (routing.num_groups, -1))
        best_TG = rank_TGE.topk(min(routing.num_best, rank_TGE.shape[2])).values.sum(-1)
        chosen_TG = best_TG.topk(routing.num_active_groups).indices
        is_open_TG = torch.zeros_like(best_TG, dtype=torch.bool).scatter_(1, chosen_TG, True)
        rank_TE = rank_TGE.masked_fill(~is_open_TG.unsqueeze(-1), -torch.inf).flatten(1)
    experts_TK = rank_TE.topk(routing.num_active).indices
    weights_TK = scores_TE.gather(1, experts_TK)
    if routing.renormalize:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + _TINY)
    slots_TK = slot_of_E[experts_TK]
    slots_P = slots_TK.flatten().long()
    load_S.scatter_add_(0, slots_P, torch.ones_like(slots_P))
    return slots_TK, weights_TK * routing.scale


@op(gpu_module="penstock.kernels.moe.grouped_gemm")
def experts(
    x_TD: Tensor,
    slots_TK: Tensor,
    weights_TK: Tensor,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    gate_up_bias_S2F: Tensor | None,
    down_bias_SD: Tensor | None,
    gate: Gate,
) -> Tensor:
    """Sum over a token's experts of weight * down(gated(gate_up(x))), in fp32, back in x's dtype.

    FP8 weights take FP8 inputs; the gate's output is rounded to x's dtype before it is quantized.
    Here every token goes through every expert, most with weight zero.
    """
    y_TD = torch.zeros_like(x_TD, dtype=torch.float32)
    for slot in range(gate_up.num_slots):
        weight_T1 = (weights_TK * (slots_TK == slot)).sum(1, keepdim=True)
        h_TF = gated.reference(_linear32(x_TD, gate_up, gate_up_bias_S2F, slot), gate)
        if down.inputs != PLAIN:
            h_TF = h_TF.to(x_TD.dtype)
        y_TD += weight_T1 * _linear32(h_TF, down, down_bias_SD, slot)
    return y_TD.to(x_TD.dtype)


@op(gpu_module="penstock.kernels.moe.shared_expert")
def add_shared(y_TD: Tensor, shared_TD: Tensor, x_TD: Tensor, gate_1D: Tensor | None) -> Tensor:
    """y + shared * sigmoid(x . gate), without a gate y + shared; in fp32, back in y's dtype."""
    if gate_1D is None:
        return y_TD + shared_TD
    gate_T1 = F.linear(x_TD.float(), gate_1D.float()).sigmoid()
    return (y_TD.float() + shared_TD.float() * gate_T1).to(y_TD.dtype)


def _linear32(x_TI: Tensor, weights: ExpertWeights, bias_SO: Tensor | None, slot: int) -> Tensor:
    bias_O = None if bias_SO is None else bias_SO[slot].float()
    values, scale = as_inputs(x_TI, weights.inputs, quantize_fp8.reference)
    if scale is None:
        return F.linear(values.float(), weights.matrix(slot), bias_O)
    assert weights.scale is not None, weights
    return fp8_linear.reference(
        values, scale, weights.values[slot], weights.scale[slot], bias_O, torch.float32
    )


experts.impl("activated", needs=cpu())(activated_experts)
