"""`weight_only_linear`: the GEMM of plain activations and low-bit weights (W4A16, W8A16).

Legend: T tokens, I inputs, O outputs.
"""

import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.gemm.wna16_packing import GpuPackedWeight, unpack_gpu
from penstock.kernels.op import op


@op(gpu_module="penstock.kernels.gemm.wna16_triton")
def weight_only_linear(x_TI: Tensor, weight: GpuPackedWeight, bias_O: Tensor | None) -> Tensor:
    """x W^T + b in fp32, back in x's dtype. Kernels may round a weight times its scale to 16 bits
    where x has no more."""
    return linear32(x_TI, weight, bias_O).to(x_TI.dtype)


def linear32(x_TI: Tensor, weight: GpuPackedWeight, bias_O: Tensor | None) -> Tensor:
    """The same, left in fp32."""
    y_TO = F.linear(x_TI.float(), unpack_gpu(weight).values())
    return y_TO if bias_O is None else y_TO + bias_O.float()
