"""Online quantization: schemes that quantize a plain checkpoint while it is loaded, layer by layer.

A layer's parameters hold no values until every tensor has been found; then each matrix is read,
quantized on its device, and freed. So the memory of the plain model is never needed.
"""

from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError
from penstock.kernels.moe import ExpertWeights
from penstock.kernels.quantize import BLOCK, FP8_MAX, INT8_MAX
from penstock.parallel.parameter import UnreadParameter
from penstock.quantization.scheme import (
    ExpertsShape,
    LinearShape,
    create_unread,
    create_unread_experts,
)
from penstock.quantization.w8a8 import W8A8Experts, W8A8Scheme, input_format
from penstock.types.model_spec import W8A8Spec

FORMATS = {  # of the setting `quantization`; nf4 is another scheme's
    "fp8": W8A8Spec(weights="channel", inputs="row"),
    "fp8_block": W8A8Spec(weights="block", inputs="group"),
    "int8": W8A8Spec(weights="channel", inputs="row", numbers="int8"),
}
_ROWS_AT_ONCE = 4096  # a multiple of a block's
_SMALLEST_AMAX = 1e-12


class OnlineScheme(W8A8Scheme):
    def create(
        self, layer: nn.Module, shape: LinearShape, dtype: torch.dtype, device: torch.device
    ) -> None:
        _check_width(self._spec, shape.in_features)
        create_unread(layer, shape, dtype, device)

    def finish(self, layer: Any) -> None:
        parameter: UnreadParameter = layer.weight
        del layer.weight
        layer.weight, layer.weight_scale = quantized(
            parameter.numbers(layer.dtype, layer.device), self._spec
        )


class OnlineExperts(W8A8Experts):
    def create(
        self, layer: Any, shape: ExpertsShape, dtype: torch.dtype, device: torch.device
    ) -> None:
        for inputs in (shape.hidden_size, shape.features.size):
            _check_width(self._spec, inputs)
        create_unread_experts(layer, shape, dtype, device)

    def finish(self, layer: Any) -> None:
        for part in (layer.gate_up, layer.down):
            parameter: UnreadParameter = part.weight
            del part.weight
            matrices = [
                quantized(matrix, self._spec)
                for matrix in parameter.matrices(layer.num_slots, layer.dtype, layer.device)
            ]
            values, scale = (torch.stack(parts) for parts in zip(*matrices, strict=True))
            inputs = input_format(self._spec, None)
            part.weight = ExpertWeights(values, values.shape[2], scale, inputs, layer.has_all)


def quantized(weight_OI: Tensor, spec: W8A8Spec) -> tuple[Tensor, Tensor]:
    """(values, scales) as the W8A8 GEMM of this format takes them."""
    parts = [_quantized(rows.float(), spec) for rows in weight_OI.split(_ROWS_AT_ONCE)]
    values, scales = (torch.cat(part) for part in zip(*parts, strict=True))
    return values, scales


def _quantized(weight_OI: Tensor, spec: W8A8Spec) -> tuple[Tensor, Tensor]:
    if spec.weights == "channel":
        largest = INT8_MAX if spec.numbers == "int8" else FP8_MAX
        scale_O1 = weight_OI.abs().amax(1, keepdim=True).clamp(min=_SMALLEST_AMAX) / largest
        scaled_OI = weight_OI / scale_O1
        if spec.numbers == "int8":
            return scaled_OI.round().to(torch.int8), scale_O1.squeeze(1)
        return scaled_OI.to(torch.float8_e4m3fn), scale_O1.squeeze(1)
    assert spec.weights == "block", spec
    out_features, in_features = weight_OI.shape
    padded = nn.functional.pad(weight_OI, (0, -in_features % BLOCK, 0, -out_features % BLOCK))
    blocks = padded.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
    scale = blocks.abs().amax((1, 3), keepdim=True).clamp(min=_SMALLEST_AMAX) / FP8_MAX
    values = (blocks / scale).flatten(2).flatten(0, 1)[:out_features, :in_features]
    return values.to(torch.float8_e4m3fn).contiguous(), scale[:, 0, :, 0]


def _check_width(spec: W8A8Spec, in_features: int) -> None:
    if spec.weights == "block" and in_features % BLOCK:
        raise ConfigError(
            f"quantization is fp8_block, which needs layers of whole {BLOCK} inputs; one has "
            f"{in_features} on a rank, use fp8"
        )
