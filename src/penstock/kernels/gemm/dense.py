"""`linear`: the GEMM with unquantized weights. On a CPU they are packed once into oneDNN's blocked
layout.

Legend: T tokens, I inputs, O outputs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.op import op

# Rows the blocked layout is chosen for. Good for one row as well: two threads of an AMD EPYC, fp32,
# forty 4096 x 576 matrices, against F.linear: 1 row 14 ms / 30, 4 rows 12 / 42, 8 rows 15 / 36,
# 64 rows 59 / 93, 256 rows 219 / 275 (2026-11-15).
_ROWS = 8
_EXACT_ROWS = 16  # up to which no number is padded
_PACKABLE = (torch.float32, torch.bfloat16)


def packed(weight_OI: Tensor) -> Tensor:
    """The weight as `linear` is fastest with it on its device; nothing else can read it."""
    can_pack = torch.backends.mkldnn.is_available() and weight_OI.dtype in _PACKABLE
    if weight_OI.device.type != "cpu" or not can_pack:
        return weight_OI.detach()
    return torch.ops.mkldnn._reorder_linear_weight(weight_OI.detach(), _ROWS)


@op(gpu_module="penstock.kernels.gemm.gemv")
def dense_linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """x W^T + b."""
    return F.linear(x_TI, weight_OI, bias_O)


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """x W^T + b; `weight_OI` is plain or comes from `packed`."""
    if weight_OI.is_mkldnn:
        num_tokens = x_TI.shape[0]
        x_TI = F.pad(x_TI, (0, 0, 0, padded_rows(num_tokens) - num_tokens))
        out_TO = torch.ops.mkldnn._linear_pointwise(x_TI, weight_OI, bias_O, "none", [], "")
        return out_TO[:num_tokens]
    return dense_linear(x_TI, weight_OI, bias_O)


def padded_rows(num_tokens: int) -> int:
    """The next of few numbers of rows, at most an eighth more from 16 on.

    oneDNN compiles a kernel for each number, which takes milliseconds and a tenth of a megabyte
    that it keeps: with prompts of any length a server would compile and grow for a long time.
    """
    if num_tokens <= _EXACT_ROWS:
        return num_tokens
    step = 1 << ((num_tokens - 1).bit_length() - 4)
    return -(-num_tokens // step) * step
