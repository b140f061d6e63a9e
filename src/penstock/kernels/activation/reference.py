"""The meaning of the gated activations, and a CPU version without the fp32 detour.

Legend: T tokens, F features; 2F is the gate's features, then the up projection's.
"""

import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.op import cpu, op


@op(gpu_module="penstock.kernels.activation.triton")
def silu_mul(x_T2F: Tensor) -> Tensor:
    """silu(gate) * up, in fp32, back in x's dtype."""
    gate_TF, up_TF = x_T2F.chunk(2, dim=-1)
    return (F.silu(gate_TF.float()) * up_TF.float()).to(x_T2F.dtype)


@silu_mul.impl("torch", needs=cpu())
def silu_mul_torch(x_T2F: Tensor) -> Tensor:
    """In x's dtype, without a third tensor."""
    gate_TF, up_TF = x_T2F.chunk(2, dim=-1)
    return F.silu(gate_TF).mul_(up_TF)
