"""`gated`: the activation between the two GEMMs of an expert.

Legend: T rows, F features; 2F is the gate's features, then the up projection's.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.activation import silu_mul
from penstock.kernels.op import cpu, op


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """(up + shift) * gate * sigmoid(alpha * gate); gate is cut above `limit`, up on both sides."""

    alpha: float = 1.0
    shift: float = 0.0
    limit: float = float("inf")


SILU = Gate()  # silu(gate) * up


@op
def gated(x_T2F: Tensor, gate: Gate) -> Tensor:
    """What `gate` makes of each row, in fp32, back in x's dtype."""
    gate_TF, up_TF = x_T2F.float().chunk(2, dim=-1)
    gate_TF, up_TF = gate_TF.clamp(max=gate.limit), up_TF.clamp(-gate.limit, gate.limit)
    y_TF = (up_TF + gate.shift) * gate_TF * torch.sigmoid(gate.alpha * gate_TF)
    return y_TF.to(x_T2F.dtype)


@gated.impl("silu", needs=cpu(), fits=lambda x_T2F, gate: gate == SILU)
def gated_silu(x_T2F, gate):
    return silu_mul(x_T2F)
