"""Which quantization scheme each of a model's layers gets."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from penstock.errors import ConfigError
from penstock.hub.gguf_file import is_gguf
from penstock.kernels.native import library
from penstock.quantization.block_scaled import (
    BlockScaledExperts,
    BlockScaledMxfp4Experts,
    BlockScaledScheme,
)
from penstock.quantization.input_scales import InputScaled
from penstock.quantization.mxfp4 import Mxfp4Experts
from penstock.quantization.online import FORMATS, OnlineExperts, OnlineScheme
from penstock.quantization.quant_config import any_excluded, is_excluded
from penstock.quantization.scheme import ExpertsScheme, LinearScheme, TableScheme
from penstock.quantization.unquantized import Unquantized, UnquantizedExperts
from penstock.quantization.w4a8 import W4A8Scheme
from penstock.quantization.w8a8 import W8A8Experts, W8A8Scheme
from penstock.quantization.weight_only import Int8Experts, WeightOnlyExperts, WeightOnlyScheme
from penstock.quantization.weight_only_cpu import CpuWeightOnlyExperts, CpuWeightOnlyScheme
from penstock.types.model_spec import ActivationFormat, QuantSpec, W8A8Spec


@dataclass(frozen=True, slots=True)
class Schemes:
    """The last two are asked with the names that the checkpoint has for the parts of a layer."""

    tables: TableScheme  # of embedding and head
    linear: Callable[[Sequence[str]], LinearScheme]
    experts: Callable[[Sequence[str]], ExpertsScheme]


def choose_schemes(
    quantization: QuantSpec | None,
    path: Path | None,
    dtype: torch.dtype,
    device: torch.device,
    experts_by_reference: bool = False,
    online: str | None = None,
    activations: Collection[ActivationFormat] = (),
) -> Schemes:
    """`path` is where the weights are read from, if they are; `online`, the format that plain ones
    are quantized to while loading; `activations`, what activations become where the weights are
    for it.

    GGUF weights stay packed where there is a kernel for them; elsewhere they are dequantized while
    loading, as are those of experts that the reference shall compute.
    """
    plain, plain_experts = Unquantized(), UnquantizedExperts()
    is_exact = device.type == "cpu" and dtype is torch.float32
    if path is not None and is_exact and is_gguf(path) and library() is not None:
        packed = CpuWeightOnlyScheme()
        packed_experts = plain_experts if experts_by_reference else CpuWeightOnlyExperts()
        return Schemes(
            tables=packed, linear=lambda names: packed, experts=lambda names: packed_experts
        )
    if online is not None:
        return _online(online, device)
    if quantization is not None and quantization.mixed:
        return _mixed(quantization, path, dtype, device, experts_by_reference, activations)
    if quantization is not None and quantization.weight_only is not None:
        return _weight_only(
            quantization, is_exact and path is not None, device, experts_by_reference, activations
        )
    if quantization is None or quantization.format is None:
        return Schemes(
            tables=plain, linear=lambda names: plain, experts=lambda names: plain_experts
        )
    of_linear, of_experts = _schemes(quantization.format, device.type != "cpu", activations)
    if quantization.has_input_scales:
        of_linear = InputScaled(of_linear)
    return Schemes(
        tables=plain,
        linear=lambda names: plain if is_excluded(quantization, names) else of_linear,
        experts=lambda names: plain_experts if is_excluded(quantization, names) else of_experts,
    )


def _mixed(
    quantization: QuantSpec,
    path: Path | None,
    dtype: torch.dtype,
    device: torch.device,
    experts_by_reference: bool,
    activations: Collection[ActivationFormat],
) -> Schemes:
    """Each part as a checkpoint of its own; a module of none is plain."""
    plain = choose_schemes(None, None, dtype, device)
    of_module: dict[str, Schemes] = {}
    for part in quantization.mixed:
        schemes = choose_schemes(
            part.spec, path, dtype, device, experts_by_reference, activations=activations
        )
        of_module |= dict.fromkeys(part.modules, schemes)

    def of(names: Sequence[str]) -> Schemes:
        found = [of_module.get(name, plain) for name in names]
        if any(schemes is not found[0] for schemes in found):
            raise ConfigError(
                f"the checkpoint quantizes {', '.join(names[:4])} differently, which are "
                "multiplied as one; this is not supported"
            )
        return found[0]

    return Schemes(
        tables=plain.tables,
        linear=lambda names: of(names).linear(names),
        experts=lambda names: of(names).experts(names),
    )


def _weight_only(
    quantization: QuantSpec,
    is_exact: bool,
    device: torch.device,
    experts_by_reference: bool,
    activations: Collection[ActivationFormat],
) -> Schemes:
    """Packed on a GPU, and on a CPU as those of a GGUF file."""
    plain, plain_experts = Unquantized(), UnquantizedExperts()
    linear: LinearScheme = plain
    experts: ExpertsScheme = plain_experts
    spec, has_kernel = quantization.weight_only, device.type != "cpu"
    inputs = quantization.activation_formats & {*activations}
    if "fp8" in inputs:
        linear, experts = W4A8Scheme(spec, has_kernel), WeightOnlyExperts(spec, has_kernel)
    elif inputs:
        linear, experts = BlockScaledScheme(spec, has_kernel), BlockScaledExperts(spec, has_kernel)
    elif has_kernel:
        linear, experts = WeightOnlyScheme(spec, has_kernel), WeightOnlyExperts(spec, has_kernel)
    elif is_exact and library() is not None:
        linear = CpuWeightOnlyScheme()
        experts = plain_experts if experts_by_reference else CpuWeightOnlyExperts()
    if quantization.has_input_scales:
        linear = InputScaled(linear)
    return Schemes(
        tables=plain,
        linear=lambda names: plain if any_excluded(quantization, names) else linear,
        experts=lambda names: plain_experts if any_excluded(quantization, names) else experts,
    )


def _online(online: str, device: torch.device) -> Schemes:
    """Online quantization. INT8 experts are weight-only: their inputs stay plain."""
    has_kernel = device.type != "cpu"
    linear: LinearScheme = (
        WeightOnlyScheme(None, has_kernel) if online == "nf4" else OnlineScheme(FORMATS[online])
    )
    experts: ExpertsScheme = WeightOnlyExperts(None, has_kernel, online)
    if online.startswith("fp8"):
        experts = OnlineExperts(FORMATS[online])
    return Schemes(tables=Unquantized(), linear=lambda names: linear, experts=lambda names: experts)


def _schemes(
    format: W8A8Spec | Literal["mxfp4"],
    has_kernel: bool,
    activations: Collection[ActivationFormat],
) -> tuple[LinearScheme, ExpertsScheme]:
    match format:
        case W8A8Spec(numbers="int8"):
            return W8A8Scheme(format), Int8Experts(format, has_kernel)
        case W8A8Spec():
            return W8A8Scheme(format), W8A8Experts(format)
        case "mxfp4":
            is_scaled = "mxfp8" in activations
            return Unquantized(), BlockScaledMxfp4Experts() if is_scaled else Mxfp4Experts()
