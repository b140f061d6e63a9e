"""Quantizes the matrices of one decoder block, with the calibration inputs of its layers.

Legend: O outputs, I inputs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from penstock.layers.attention import Attention
from penstock.layers.decoder import DecoderBlock
from penstock.layers.linear import Linear
from penstock.layers.mlp import GatedMLP
from penstock.layers.moe import Experts
from penstock.layers.norm import ResidualLayerNorm
from penstock.ptq import search
from penstock.ptq.calibrate import Inputs
from penstock.ptq.formats import MOVING, Format, Quantized, grid_of
from penstock.quantization.quant_config import any_excluded
from penstock.types.model_spec import QuantSpec
from penstock.weights.mapping import Rules, Target

Read = Callable[[str], Tensor]  # a checkpoint's tensor by its name, in fp32


@dataclass(slots=True)
class QuantizedBlock:
    """New tensors by name, norms of new numbers, names of what both replace, errors by matrix."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    norms: dict[str, Tensor] = field(default_factory=dict)
    replaced: set[str] = field(default_factory=set)
    errors: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Recipe:
    format: Format
    group: int
    exclude: tuple[str, ...]  # words of the names of modules that stay as they are

    def leaves(self, sources: Sequence[str]) -> bool:
        """Parts of a layer that are multiplied as one are left together."""
        names = [source.removesuffix(".weight") for source in sources]
        return any_excluded(QuantSpec(format=None, excluded=self.exclude), names)


def quantize_block(
    block: DecoderBlock,
    prefix: str,
    rules: Rules,
    inputs: dict[str, Inputs],
    read: Read,
    recipe: Recipe,
) -> QuantizedBlock:
    """`prefix` is the block's name among our modules, such as layers.7."""
    done = QuantizedBlock()

    def names(layer: str, num_parts: int) -> list[str]:
        parts = range(num_parts)
        return [rules.source(Target(f"{prefix}.{layer}.weight", part)) for part in parts]

    linears = {
        name: layer
        for name, layer in block.named_modules()
        if isinstance(layer, Linear) and not recipe.leaves(names(name, len(layer.shape.outputs)))
    }
    weights = {
        name: [read(source) for source in names(name, len(layer.shape.outputs))]
        for name, layer in linears.items()
    }
    scales = _moved_scales(block, weights, inputs, recipe)
    for name in linears:
        rows = _row_scales(name, scales, weights)
        for source, weight_OI, row_O1 in zip(
            names(name, len(weights[name])), weights[name], rows, strict=True
        ):
            columns_I = scales.get(name, weight_OI.new_ones(weight_OI.shape[1]))
            scaled_OI = weight_OI * columns_I / row_O1
            found = _quantized(scaled_OI, inputs[name], columns_I, recipe)
            back_OI = found.values_OI / columns_I * row_O1
            _keep(done, source, found)
            done.errors[source] = search.error(weight_OI, back_OI, inputs[name].moments_II)
    for layer, norm in _NORMS.items():
        if layer in scales:
            source = rules.source(Target(f"{prefix}.{norm}.weight"))
            done.norms[source] = _divided(read(source), scales[layer], block, norm)
            done.replaced.add(source)
    for name, experts in block.named_modules():
        if isinstance(experts, Experts):
            for part, per_slot in (("gate_up", 2), ("down", 1)):
                sources = names(f"{name}.{part}", per_slot * experts.num_slots)
                for source in () if recipe.leaves(sources) else sources:
                    weight_OI = read(source)
                    found = grid_of(weight_OI, recipe.format, recipe.group).packed(weight_OI)
                    _keep(done, source, found)
                    lost = (weight_OI - found.values_OI).norm() / weight_OI.norm()
                    done.errors[source] = float(lost)
    return done


_NORMS = {"attention.qkv_proj": "input_norm", "mlp.gate_up_proj": "post_norm"}


def _keep(done: QuantizedBlock, source: str, found: Quantized) -> None:
    module = source.removesuffix(".weight")
    for suffix, tensor in found.tensors.items():
        done.tensors[f"{module}.{suffix}"] = tensor.contiguous().cpu()
    done.replaced.add(source)


def _quantized(scaled_OI: Tensor, inputs: Inputs, columns_I: Tensor, recipe: Recipe) -> Quantized:
    moments_II = inputs.moments_II / columns_I / columns_I[:, None]
    grid = grid_of(scaled_OI, recipe.format, recipe.group, moments_II.diagonal())
    return search.compensated(scaled_OI, moments_II, grid)


def _moved_scales(
    block: DecoderBlock, weights: dict[str, list[Tensor]], inputs: dict[str, Inputs], recipe: Recipe
) -> dict[str, Tensor]:
    """What columns of a layer are multiplied with, and what makes its inputs is divided by."""
    if recipe.format not in MOVING:
        return {}
    movable = []
    has_bias = isinstance(block.input_norm, ResidualLayerNorm)  # which would have to move as well
    if isinstance(block.attention, Attention) and "attention.qkv_proj" in weights and not has_bias:
        movable.append("attention.qkv_proj")
    if isinstance(block.mlp, GatedMLP) and "mlp.gate_up_proj" in weights:
        movable.append("mlp.gate_up_proj")
        if block.mlp.gate_up_proj.bias is None and "mlp.down_proj" in weights:
            movable.append("mlp.down_proj")  # the up projection makes its inputs
    found = {}
    for name in movable:
        weights_OI, known = torch.cat(weights[name]), inputs[name]
        found[name] = (
            search.smoothing_scales(weights_OI, known.largest_I)
            if recipe.format == "int8_sq"
            else search.awq_scales(weights_OI, known.moments_II, known.mean_I, recipe.group)
        )
    return found


def _row_scales(
    name: str, scales: dict[str, Tensor], weights: dict[str, list[Tensor]]
) -> list[Tensor]:
    """What rows of a layer's parts are divided by: those of the up projection, for the next."""
    rows = [weight.new_ones((len(weight), 1)) for weight in weights[name]]
    if name == "mlp.gate_up_proj" and "mlp.down_proj" in scales:
        rows[1] = scales["mlp.down_proj"][:, None]
    return rows


def _divided(weight_I: Tensor, scales_I: Tensor, block: Any, norm: str) -> Tensor:
    """A norm's weight whose outputs are divided; it may be kept as what is added to one."""
    is_centered = float(getattr(block, norm).zero_centered)
    return (weight_I + is_centered) / scales_I.to(weight_I.device) - is_centered
