"""The W8A8 scheme (FP8 or INT8): weights as the checkpoint has them, activations of the same kind.

Fused matrices keep their own scales. Where per-tensor scales differ, each output gets that of its
matrix: the values stay those of the checkpoint, and a GEMM with per-output scales costs no more
than one with a single scale.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError
from penstock.kernels.formats import (
    Activation,
    Fp8,
    Fp8Groups,
    Fp8Rows,
    Fp8Static,
    InputFormat,
    Int8,
    Int8Rows,
    Int8Static,
    Plain,
)
from penstock.kernels.gemm import gated_linear
from penstock.kernels.gemm.fp8 import dequantized, fp8_linear
from penstock.kernels.gemm.int8 import int8_linear
from penstock.kernels.moe import ExpertWeights
from penstock.kernels.quantize import BLOCK
from penstock.parallel.parameter import PlacedParameter, new_parameter
from penstock.parallel.shard import Piece, Shard, Span
from penstock.quantization.scheme import (
    ExpertsShape,
    LinearShape,
    apply_experts,
    create_bias,
    create_expert_biases,
    fuses_gate,
    largest_of_ranks,
    matrix_pieces,
)
from penstock.types.model_spec import W8A8Spec

_DTYPES = {"e4m3": torch.float8_e4m3fn, "int8": torch.int8}
_DUMMY_SPREADS = {"e4m3": 64.0, "int8": 32.0}  # of random weights: such that few are cut
_DUMMY_INPUT_SCALES = {"e4m3": 16 / 448, "int8": 16 / 127}  # activations of such are around one


class W8A8Scheme:
    def __init__(self, spec: W8A8Spec) -> None:
        self._spec = spec

    def create(
        self, layer: nn.Module, shape: LinearShape, dtype: torch.dtype, device: torch.device
    ) -> None:
        assert shape.num_padding == 0, shape
        layer.weight = new_parameter(
            (shape.out_features, shape.in_features),
            _DTYPES[self._spec.numbers],
            device,
            matrix_pieces(shape),
            typical=(0.0, _DUMMY_SPREADS[self._spec.numbers]),
        )
        setattr(layer, self._spec.scale_name, self._weight_scale(shape, device))
        if self._spec.inputs == "static":
            dummy = _DUMMY_INPUT_SCALES[self._spec.numbers]
            layer.input_scale = _scale_per_part(shape, device, dummy)
        create_bias(layer, shape, dtype, device)

    def finish(self, layer: Any) -> None:
        weight, scale = layer.weight.detach(), getattr(layer, self._spec.scale_name).detach()
        del layer.weight
        delattr(layer, self._spec.scale_name)
        if self._spec.weights == "tensor":
            if (scale == scale[0]).all():
                scale = scale[:1]
            else:
                sizes = [outputs.target.size for outputs in layer.shape.outputs]
                scale = scale.repeat_interleave(torch.tensor(sizes, device=scale.device))
        layer.weight, layer.weight_scale = weight, scale.contiguous()
        if self._spec.inputs == "static":
            # All parts have the same input; the largest of their scales lets nothing overflow.
            input_scale = layer.input_scale.detach().amax(0, keepdim=True)
            del layer.input_scale
            layer.input_scale = input_scale

    def input_format(self, layer: Any, num_tokens: int) -> InputFormat:
        scale_1 = layer.input_scale if self._spec.inputs == "static" else None
        return input_format(self._spec, scale_1)

    def apply(self, layer: Any, x_TI: Activation, add_bias: bool) -> Tensor:
        assert isinstance(x_TI, Fp8 | Int8)
        multiply = fp8_linear if isinstance(x_TI, Fp8) else int8_linear
        bias = layer.bias if add_bias else None
        return multiply(
            x_TI.values_TD, x_TI.scale, layer.weight, layer.weight_scale, bias, layer.dtype
        )

    def apply_gated(self, layer: Any, x_TI: Activation, wanted: InputFormat) -> Activation | None:
        if not isinstance(x_TI, Fp8):
            return None
        is_few = fuses_gate(layer, x_TI.values_TD.shape[0])
        if not is_few or layer.weight_scale.dim() == 2 or not isinstance(wanted, Plain | Fp8Static):
            return None
        out_scale_1 = wanted.scale_1 if isinstance(wanted, Fp8Static) else None
        y_TF = gated_linear(
            x_TI.values_TD, x_TI.scale, layer.weight, layer.weight_scale, layer.bias, layer.dtype,
            out_scale_1,
        )  # fmt: skip
        return y_TF if out_scale_1 is None else Fp8(y_TF, out_scale_1)

    def values(self, layer: Any) -> Tensor:
        return dequantized(layer.weight, layer.weight_scale).to(layer.dtype)

    def _weight_scale(self, shape: LinearShape, device: torch.device) -> PlacedParameter:
        dummy = 1 / (_DUMMY_SPREADS[self._spec.numbers] * math.sqrt(shape.in_features))
        match self._spec.weights:
            case "tensor":
                return _scale_per_part(shape, device, dummy)
            case "channel":
                pieces = tuple(Piece((outputs,)) for outputs in shape.outputs)
                size: tuple[int, ...] = (shape.out_features,)
            case "block":
                inputs = _in_blocks(shape.inputs)
                pieces = tuple(Piece((_in_blocks(outputs), inputs)) for outputs in shape.outputs)
                size = (pieces[-1].shards[0].target.stop, inputs.target.size)
            case _:
                raise AssertionError(self._spec)
        return new_parameter(size, torch.float32, device, pieces, typical=(dummy, 0.0))


class W8A8Experts:
    """As `W8A8Scheme`. Scales of whole matrices become one per output: those of gate and up
    differ.

    Of the scales of static inputs the largest counts, of all experts of all ranks: their input is
    one and the same, and of what the gates make nothing overflows either. An expert may move.
    """

    def __init__(self, spec: W8A8Spec) -> None:
        self._spec = spec

    @property
    def group(self) -> int:
        return BLOCK if self._spec.weights == "block" else 1

    def create(
        self, layer: Any, shape: ExpertsShape, dtype: torch.dtype, device: torch.device
    ) -> None:
        num_slots, size, features = shape.num_slots, shape.hidden_size, shape.features.size
        for part, outputs, inputs, pieces in (
            (layer.gate_up, 2 * features, size, shape.gate_up_pieces()),
            (layer.down, size, features, shape.down_pieces()),
        ):
            part.weight = new_parameter(
                (num_slots, outputs, inputs), _DTYPES[self._spec.numbers], device, pieces,
                typical=(0.0, _DUMMY_SPREADS[self._spec.numbers]),
            )  # fmt: skip
            scale = self._weight_scale(shape, outputs, inputs, pieces, device)
            setattr(part, self._spec.scale_name, scale)
            if self._spec.inputs == "static":
                dummy = _DUMMY_INPUT_SCALES[self._spec.numbers]
                part.input_scale = _scale_per_expert(shape, pieces, device, dummy)
        create_expert_biases(layer, shape, dtype, device)

    def finish(self, layer: Any) -> None:
        for part in (layer.gate_up, layer.down):
            weight, scale, input_scale = self._loaded(layer, part)
            inputs = input_format(self._spec, input_scale)
            part.weight = ExpertWeights(weight, weight.shape[2], scale, inputs, layer.has_all)

    def _loaded(self, layer: Any, part: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        """(values, scales, the scale of static inputs) of what was loaded, and is no more there."""
        weight, scale = part.weight.detach(), getattr(part, self._spec.scale_name).detach()
        del part.weight
        delattr(part, self._spec.scale_name)
        if self._spec.weights == "tensor":
            scale = scale.repeat_interleave(weight.shape[1] // scale.shape[1], dim=1)
        input_scale = None
        if self._spec.inputs == "static":
            input_scale = part.input_scale.detach().amax().view(1)
            largest_of_ranks(input_scale, layer)
            del part.input_scale
        return weight, scale.contiguous(), input_scale

    def apply(
        self, layer: Any, x_TD: Tensor, slots_TK: Tensor, weights_TK: Tensor, add_bias: bool
    ) -> Tensor:
        gate_up, down = layer.gate_up.weight, layer.down.weight
        return apply_experts(layer, x_TD, slots_TK, weights_TK, gate_up, down, add_bias)

    def _weight_scale(
        self,
        shape: ExpertsShape,
        outputs: int,
        inputs: int,
        pieces: tuple[Piece, ...],
        device: torch.device,
    ) -> PlacedParameter:
        dummy = 1 / (_DUMMY_SPREADS[self._spec.numbers] * math.sqrt(inputs))
        match self._spec.weights:
            case "tensor":
                return _scale_per_expert(shape, pieces, device, dummy)
            case "channel":
                pieces = tuple(Piece(piece.shards[:2]) for piece in pieces)
                size: tuple[int, ...] = (shape.num_slots, outputs)
            case "block":
                pieces = tuple(
                    Piece((piece.shards[0], *map(_in_blocks, piece.shards[1:]))) for piece in pieces
                )
                size = (shape.num_slots, *(shard.target.stop for shard in pieces[-1].shards[1:]))
            case _:
                raise AssertionError(self._spec)
        return new_parameter(size, torch.float32, device, pieces, typical=(dummy, 0.0))


def _scale_per_expert(
    shape: ExpertsShape, pieces: tuple[Piece, ...], device: torch.device, dummy: float
) -> PlacedParameter:
    """One number for each matrix of each slot."""
    num_parts = len(pieces) // shape.num_experts
    placed = tuple(
        Piece(
            (
                piece.shards[0],
                Shard(full_size=1, source=Span(0, 1), target=Span(number % num_parts, 1)),
            )
        )
        for number, piece in enumerate(pieces)
    )
    size = (shape.num_slots, num_parts)
    return new_parameter(size, torch.float32, device, placed, typical=(dummy, 0.0))


def input_format(spec: W8A8Spec, scale_1: Tensor | None) -> InputFormat:
    """The activations that GEMMs of this kind take; `scale_1` is that of static inputs."""
    is_float = spec.numbers == "e4m3"
    match spec.inputs:
        case "static":
            assert scale_1 is not None, spec
            return Fp8Static(scale_1) if is_float else Int8Static(scale_1)
        case "row":
            return Fp8Rows() if is_float else Int8Rows()
        case "group":
            return Fp8Groups(BLOCK)
    raise AssertionError(spec)


def _scale_per_part(shape: LinearShape, device: torch.device, dummy: float) -> PlacedParameter:
    """One number for each of the fused matrices."""
    num_parts = len(shape.outputs)
    pieces = tuple(
        Piece((Shard(full_size=1, source=Span(0, 1), target=Span(part, 1)),))
        for part in range(num_parts)
    )
    return new_parameter((num_parts,), torch.float32, device, pieces, typical=(dummy, 0.0))


def _in_blocks(shard: Shard) -> Shard:
    """The same shard, counted in blocks."""
    source, target = shard.source, shard.target
    ends_whole = source.size % BLOCK == 0 or source.stop == shard.full_size
    if source.start % BLOCK or target.start % BLOCK or not ends_whole:
        raise ConfigError(
            f"the checkpoint has scales for blocks of {BLOCK} x {BLOCK}, and a rank's shard of a "
            f"layer, {source.start} to {source.stop} of {shard.full_size}, cuts through one; use a "
            "smaller tensor_parallel_size"
        )
    num_blocks = -(-source.size // BLOCK)
    return Shard(
        full_size=-(-shard.full_size // BLOCK),
        source=Span(source.start // BLOCK, num_blocks),
        target=Span(target.start // BLOCK, num_blocks),
    )
