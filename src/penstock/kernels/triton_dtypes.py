"""Torch's dtypes of activations as Triton names them."""

import torch
import triton.language as tl

TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}
