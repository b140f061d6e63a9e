"""Which scheme each of a model's layers gets."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from penstock.hub.gguf import is_gguf
from penstock.kernels.native import library
from penstock.quant.coded import CodedExperts, CodedScheme, Int8Experts
from penstock.quant.eight_bits import EightBitExperts, EightBitScheme
from penstock.quant.made import FORMATS, MadeExperts, MadeScheme
from penstock.quant.mxfp4 import Mxfp4Experts
from penstock.quant.none import Unquantized, UnquantizedExperts
from penstock.quant.packed import PackedCodes, PackedExperts
from penstock.quant.parse import any_excluded, is_excluded
from penstock.quant.scheme import ExpertsScheme, LinearScheme, TableScheme
from penstock.types.model_spec import EightBitSpec, QuantSpec


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
    made: str | None = None,
) -> Schemes:
    """`path` is where the weights are read from, if they are; `made`, what plain ones become.

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
    if made is not None:
        return _making(made, device)
    if quantization is not None and quantization.codes is not None:
        return _of_codes(quantization, is_exact and path is not None, device, experts_by_reference)
    if quantization is None or quantization.format is None:
        return Schemes(
            tables=plain, linear=lambda names: plain, experts=lambda names: plain_experts
        )
    of_linear, of_experts = _schemes(quantization.format, keeps_codes=device.type != "cpu")
    return Schemes(
        tables=plain,
        linear=lambda names: plain if is_excluded(quantization, names) else of_linear,
        experts=lambda names: plain_experts if is_excluded(quantization, names) else of_experts,
    )


def _of_codes(
    quantization: QuantSpec, is_exact: bool, device: torch.device, experts_by_reference: bool
) -> Schemes:
    """Codes on a GPU, and on a CPU as those of a GGUF file."""
    plain, plain_experts = Unquantized(), UnquantizedExperts()
    linear: LinearScheme = plain
    experts: ExpertsScheme = plain_experts
    if device.type != "cpu":
        linear = CodedScheme(quantization.codes, keeps_codes=True)
        experts = CodedExperts(quantization.codes, keeps_codes=True)
    elif is_exact and library() is not None:
        linear = PackedCodes()
        experts = plain_experts if experts_by_reference else PackedExperts()
    return Schemes(
        tables=plain,
        linear=lambda names: plain if any_excluded(quantization, names) else linear,
        experts=lambda names: plain_experts if any_excluded(quantization, names) else experts,
    )


def _making(made: str, device: torch.device) -> Schemes:
    """Experts of whole numbers have plain inputs: only codes of theirs are multiplied."""
    keeps_codes = device.type != "cpu"
    linear: LinearScheme = (
        CodedScheme(None, keeps_codes) if made == "nf4" else MadeScheme(FORMATS[made])
    )
    experts: ExpertsScheme = CodedExperts(None, keeps_codes, made)
    if made.startswith("fp8"):
        experts = MadeExperts(FORMATS[made])
    return Schemes(tables=Unquantized(), linear=lambda names: linear, experts=lambda names: experts)


def _schemes(
    format: EightBitSpec | Literal["mxfp4"], keeps_codes: bool
) -> tuple[LinearScheme, ExpertsScheme]:
    match format:
        case EightBitSpec(numbers="int8"):
            return EightBitScheme(format), Int8Experts(format, keeps_codes)
        case EightBitSpec():
            return EightBitScheme(format), EightBitExperts(format)
        case "mxfp4":
            return Unquantized(), Mxfp4Experts()
