"""Which scheme each of a model's layers gets."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from penstock.hub.gguf import is_gguf
from penstock.kernels.native import library
from penstock.quant.fp8 import Fp8Experts, Fp8Scheme
from penstock.quant.mxfp4 import Mxfp4Experts
from penstock.quant.none import Unquantized, UnquantizedExperts
from penstock.quant.packed import PackedCodes, PackedExperts
from penstock.quant.parse import is_excluded
from penstock.quant.scheme import ExpertsScheme, LinearScheme, TableScheme
from penstock.types.model_spec import Fp8Spec, QuantSpec


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
) -> Schemes:
    """`path` is where the weights are read from, if they are.

    Codes of a GGUF file stay packed where there is a kernel that multiplies them; elsewhere they
    are unpacked while loading, as are those of experts that the reference shall compute.
    """
    plain, plain_experts = Unquantized(), UnquantizedExperts()
    is_exact = device.type == "cpu" and dtype is torch.float32
    if path is not None and is_exact and is_gguf(path) and library() is not None:
        packed = PackedCodes()
        packed_experts = plain_experts if experts_by_reference else PackedExperts()
        return Schemes(
            tables=packed, linear=lambda names: packed, experts=lambda names: packed_experts
        )
    if quantization is None or quantization.format is None:
        return Schemes(
            tables=plain, linear=lambda names: plain, experts=lambda names: plain_experts
        )
    of_linear, of_experts = _schemes(quantization.format)
    return Schemes(
        tables=plain,
        linear=lambda names: plain if is_excluded(quantization, names) else of_linear,
        experts=lambda names: plain_experts if is_excluded(quantization, names) else of_experts,
    )


def _schemes(format: Fp8Spec | Literal["mxfp4"]) -> tuple[LinearScheme, ExpertsScheme]:
    match format:
        case Fp8Spec():
            return Fp8Scheme(format), Fp8Experts(format)
        case "mxfp4":
            return Unquantized(), Mxfp4Experts()
