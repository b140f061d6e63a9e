"""The W4A8 scheme (ModelOpt's W4A8_AWQ): weights stay INT4, activations become FP8 (E4M3) by the
checkpoint's static scale, in the kernel that makes them.

A layer whose parts do not all say how, or of which a rank's shard cuts through a group, is
weight-only.
"""

from typing import Any

from torch import Tensor

from penstock.kernels.formats import Activation, Fp8, Fp8Static, InputFormat
from penstock.kernels.gemm.w4a8 import W4A8Weight, pack_w4a8, w4a8_linear
from penstock.parallel.parameter import UnreadParameter
from penstock.quantization.weight_only import WeightOnlyScheme, quantized_parts


class W4A8Scheme(WeightOnlyScheme):
    def input_format(self, layer: Any, num_tokens: int) -> InputFormat:
        if not isinstance(layer.weight, W4A8Weight):
            return super().input_format(layer, num_tokens)
        return Fp8Static(layer.weight.input_scale_1)

    def apply(self, layer: Any, x_TI: Activation, add_bias: bool) -> Tensor:
        if not isinstance(layer.weight, W4A8Weight):
            return super().apply(layer, x_TI, add_bias)
        assert isinstance(x_TI, Fp8)
        bias = layer.bias if add_bias else None
        return w4a8_linear(x_TI.values_TD, x_TI.scale, layer.weight, bias, layer.dtype)

    def values(self, layer: Any) -> Tensor:
        if not isinstance(layer.weight, W4A8Weight):
            return super().values(layer)
        return layer.weight.values().to(layer.dtype)

    def _weight(self, parameter: UnreadParameter, layer: Any) -> Any:
        (parts,) = quantized_parts(parameter, 1, self._spec, layer.device)
        weight = None if parts is None else pack_w4a8(parts)
        return super()._weight(parameter, layer) if weight is None else weight
