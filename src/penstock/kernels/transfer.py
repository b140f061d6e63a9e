"""Copies between host and device that neither side waits for.

They go through pinned memory, which torch's allocator keeps until the copy is done.
"""

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """On a CPU the tensor shares the array's memory."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor


def start_copy_to_host(tensor: Tensor) -> Tensor:
    """The same on the host. A GPU only starts the copy: wait for its stream before reading."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
