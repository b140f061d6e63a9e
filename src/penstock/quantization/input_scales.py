"""A scheme whose activations are first multiplied by a number per input: `pre_quant_scale` of
ModelOpt's AWQ and SmoothQuant. Where a norm or a matrix before it has taken it up, a checkpoint has
no such tensor, and the layer costs what it would without."""

from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError
from penstock.kernels.formats import (
    PLAIN,
    Activation,
    Fp8,
    Fp8Static,
    InputFormat,
    Int8,
    Int8Rows,
    Int8Static,
)
from penstock.kernels.quantize import quantize_fp8, quantize_int8
from penstock.parallel.parameter import new_parameter
from penstock.parallel.shard import Piece, Shard, Span
from penstock.quantization.scheme import LinearScheme, LinearShape


class InputScaled:
    def __init__(self, inner: LinearScheme) -> None:
        self._inner = inner

    def create(
        self, layer: nn.Module, shape: LinearShape, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._inner.create(layer, shape, dtype, device)
        parts = range(len(shape.outputs))
        pieces = tuple(
            Piece((Shard(full_size=1, source=Span(0, 1), target=Span(part, 1)), shape.inputs))
            for part in parts
        )
        layer.pre_quant_scale = new_parameter(
            (len(parts), shape.in_features), torch.float32, device, pieces, default=1.0
        )

    def finish(self, layer: Any) -> None:
        scale_PI = layer.pre_quant_scale.detach()
        del layer.pre_quant_scale
        if not (scale_PI == scale_PI[0]).all():
            raise ConfigError(
                "the checkpoint has a pre_quant_scale for each of several matrices that are "
                "multiplied as one (query, key and value, or gate and up), and they differ; "
                "export it again with a newer ModelOpt, which makes them equal"
            )
        self._inner.finish(layer)
        is_one = bool((scale_PI == 1).all())
        layer.input_scales = None if is_one else scale_PI[0].to(layer.dtype)

    def input_format(self, layer: Any, num_tokens: int) -> InputFormat:
        return PLAIN if self._is_scaled(layer) else self._inner.input_format(layer, num_tokens)

    def apply(self, layer: Any, x_TI: Activation, add_bias: bool) -> Tensor:
        if self._is_scaled(layer):
            assert isinstance(x_TI, Tensor)
            x_TI = self._converted(layer, x_TI * layer.input_scales)
        return self._inner.apply(layer, x_TI, add_bias)

    def apply_gated(self, layer: Any, x_TI: Activation, wanted: InputFormat) -> Activation | None:
        return None if self._is_scaled(layer) else self._inner.apply_gated(layer, x_TI, wanted)

    def values(self, layer: Any) -> Tensor:
        values_OI = self._inner.values(layer)
        return values_OI * layer.input_scales if self._is_scaled(layer) else values_OI

    def _is_scaled(self, layer: Any) -> bool:
        return layer.input_scales is not None

    def _converted(self, layer: Any, x_TI: Tensor) -> Activation:
        match self._inner.input_format(layer, x_TI.shape[0]):
            case Fp8Static(scale_1):
                return Fp8(*quantize_fp8(x_TI, scale_1, 0))
            case Int8Static(scale_1):
                return Int8(*quantize_int8(x_TI, scale_1))
            case Int8Rows():
                return Int8(*quantize_int8(x_TI, None))
        return x_TI  # weight-only
