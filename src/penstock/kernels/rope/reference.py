"""The meaning of rotary position embedding.

Legend: T tokens, H query heads, K kv heads, N heads, D head size, C = D / 2, P positions.
"""

import torch
from torch import Tensor

from penstock.kernels.kv_write import kv_write
from penstock.kernels.op import cpu, op


def _rotate(x_TND: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    first, second, rest = x_TND.split((half, half, x_TND.shape[-1] - 2 * half), dim=-1)
    first, second = first.float(), second.float()
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat([part.to(x_TND.dtype) for part in rotated] + [rest], dim=-1)


@op(gpu_module="penstock.kernels.rope.triton")
def rope(
    q_THD: Tensor, k_TKD: Tensor, cos_sin_PD: Tensor, positions_T: Tensor
) -> tuple[Tensor, Tensor]:
    """Rotate the first `rot` channels of every head by its token's angles, in fp32; new tensors.

    Row p of the float32 table [P, rot] holds the cosines of position p, then the sines. Channel i
    is rotated together with channel i + rot / 2; channels from `rot` on pass through.
    """
    cos, sin = cos_sin_PD[positions_T].unsqueeze(1).chunk(2, dim=-1)
    return _rotate(q_THD, cos, sin), _rotate(k_TKD, cos, sin)


@rope.impl(
    "torch",
    needs=cpu(),
    fits=lambda q_THD, k_TKD, cos_sin_PD, positions_T: (
        q_THD.dtype == torch.float32 and cos_sin_PD.shape[1] == q_THD.shape[2]
    ),
)
def rope_torch(
    q_THD: Tensor, k_TKD: Tensor, cos_sin_PD: Tensor, positions_T: Tensor
) -> tuple[Tensor, Tensor]:
    """Queries and keys side by side in five calls; for a few tokens the calls are the cost."""
    num_tokens, num_heads, size = q_THD.shape
    cos_T1C, sin_T1C = cos_sin_PD[positions_T].view(num_tokens, 2, 1, size // 2).unbind(1)
    x_TN2C = torch.cat((q_THD, k_TKD), dim=1).view(num_tokens, -1, 2, size // 2)
    out_TN2C = x_TN2C * cos_T1C.unsqueeze(1)
    out_TN2C[:, :, 0].addcmul_(x_TN2C[:, :, 1], sin_T1C, value=-1)
    out_TN2C[:, :, 1].addcmul_(x_TN2C[:, :, 0], sin_T1C)
    q_out, k_out = out_TN2C.flatten(2).split((num_heads, k_TKD.shape[1]), dim=1)
    return q_out, k_out


@op(gpu_module="penstock.kernels.rope.triton")
def rope_kv_write(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    cos_sin_PD: Tensor,
    positions_T: Tensor,
    k_cache_BKSD: Tensor,
    v_cache_BKSD: Tensor,
    slots_T: Tensor,
) -> Tensor:
    """`rope`, then `kv_write` of the rotated keys and the values; returns the rotated queries."""
    q_THD, k_TKD = rope(q_THD, k_TKD, cos_sin_PD, positions_T)
    kv_write(k_TKD, v_TKD, k_cache_BKSD, v_cache_BKSD, slots_T)
    return q_THD
