"""What an all-reduce is, and one with the residual add and norm behind it.

Legend: R ranks, T tokens, D hidden size.
"""

import torch
from torch import Tensor

from penstock.kernels.norm import rms_norm
from penstock.kernels.op import op

_TRITON = "penstock.kernels.all_reduce.triton"


@op(gpu_module=_TRITON)
def sum_parts(parts_RTD: Tensor) -> Tensor:
    """The sum over the ranks, in their order and in fp32; back in the dtype of the parts."""
    return _summed(parts_RTD).to(parts_RTD.dtype)


@op(gpu_module=_TRITON)
def sum_add_rms_norm(
    parts_RTD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """(rms_norm(sum), sum) where sum = the parts' sum + residual, in fp32, rounded to its dtype."""
    sum_TD = (_summed(parts_RTD) + residual_TD.float()).to(residual_TD.dtype)
    return rms_norm.reference(sum_TD, weight_D, eps), sum_TD


def _summed(parts_RTD: Tensor) -> Tensor:
    total_TD = torch.zeros_like(parts_RTD[0], dtype=torch.float32)
    for part_TD in parts_RTD:
        total_TD = total_TD + part_TD.float()
    return total_TD
