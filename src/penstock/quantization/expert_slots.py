"""The weights of one slot of a layer of experts, as tensors that may be sent and written to."""

from dataclasses import fields
from typing import Any

from torch import Tensor

from penstock.kernels.gemm import CpuPackedWeight


def slot_tensors(layer: Any, slot: int) -> list[Tensor]:
    """Of a layer that its scheme has finished; each is a view of the memory that kernels read."""
    found = []
    for part in (layer.gate_up, layer.down):
        for whole in (part.weight, part.bias):
            if isinstance(whole, Tensor | list):
                found += _tensors(whole[slot])
            elif whole is not None:  # a record of tensors with a row for every slot, or of all
                found += [
                    one[slot]
                    for one in _tensors(whole)
                    if one.dim() and len(one) == layer.num_slots
                ]
    return found


def _tensors(weight: Any) -> list[Tensor]:
    if isinstance(weight, Tensor):
        return [weight]
    if isinstance(weight, CpuPackedWeight):
        return [weight.data_NGB]
    values = [getattr(weight, one.name) for one in fields(weight)]
    return [value for value in values if isinstance(value, Tensor)]
