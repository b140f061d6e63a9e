"""Number formats of activations and weights: the part of `resolve` about what the settings ask for,
the checkpoint has and the device multiplies. Values come with their reasons."""

from penstock.config.choices import Choices, Reasoned
from penstock.config.schema import EngineConfig
from penstock.errors import ConfigError
from penstock.types.device import DeviceInfo
from penstock.types.model_spec import ActivationFormat, ModelSpec, QuantSpec, W8A8Spec

HALVES = ("bfloat16", "float16")
FP8_ARCH = 89  # first GPU generation with FP8
_BF16_ARCH = 80  # first one with fast bfloat16
_ACTIVATIONS_ARCH: dict[ActivationFormat, int] = {"fp8": FP8_ARCH, "mxfp8": 100, "nvfp4": 100}


def dtype_of(
    config: EngineConfig, spec: ModelSpec, device: DeviceInfo, kind: str, is_coarse: bool
) -> Reasoned[str]:
    if is_coarse:
        return "float32", f"GEMMs with 16 bits of their activations, finer than {config.dtype}"
    if config.dtype != "auto":
        return config.dtype, "set by dtype"
    if kind == "cpu":
        return "float32", "default on a CPU; set dtype to halve the memory"
    if spec.dtype == "bfloat16" and device.arch < _BF16_ARCH:
        return "float16", f"sm_{device.arch} has no fast bfloat16"
    return spec.dtype, "the checkpoint's"


def quantization_of(
    setting: str,
    asked: str | None,
    spec: ModelSpec,
    device: DeviceInfo,
    kind: str,
    model_path: str,
) -> str | None:
    """What is asked for, where checkpoint and device have it."""
    found = spec.quantization
    is_quantized = found is not None and found.is_quantized
    if asked is not None and (is_quantized or model_path.endswith(".gguf")):
        raise ConfigError(
            f"{setting} is {asked}, but the checkpoint is quantized already; leave it out, or "
            "name the checkpoint that this one was made of"
        )
    if kind == "cuda" and (is_quantized or asked is not None):
        for part in [p.spec for p in found.mixed] if found is not None and found.mixed else [found]:
            _check_numbers(asked, part, device)
    return asked


def quantized_activations(
    config: EngineConfig, spec: ModelSpec, device: DeviceInfo, kind: str, choices: Choices
) -> tuple[ActivationFormat, ...]:
    formats = frozenset() if spec.quantization is None else spec.quantization.activation_formats
    if formats:
        chosen = _activation_formats(config, device, kind, formats)
        return choices.add("quantized_activations", chosen)
    if config.quantize_activations == "always":
        raise ConfigError(
            "quantize_activations is always, but the checkpoint has no weights that are multiplied "
            "with NVFP4, MXFP8 or FP8 activations; leave it out"
        )
    return ()


def _activation_formats(
    config: EngineConfig, device: DeviceInfo, kind: str, formats: frozenset[ActivationFormat]
) -> Reasoned[tuple[ActivationFormat, ...]]:
    known = tuple(sorted(formats))
    if config.quantize_activations != "auto":
        is_always = config.quantize_activations == "always"
        return known if is_always else (), "set by quantize_activations"
    arch = device.arch if kind == "cuda" else 0
    found = tuple(format for format in known if arch >= _ACTIVATIONS_ARCH[format])
    reasons = [f"the tensor cores of sm_{arch} multiply {' and '.join(found)}"] if found else []
    reasons += [
        f"tensor cores that multiply {format} begin with sm_{_ACTIVATIONS_ARCH[format]}"
        for format in known
        if format not in found
    ]
    return found, "; ".join(reasons)


def _check_numbers(asked: str | None, found: QuantSpec | None, device: DeviceInfo) -> None:
    """Refuse weights that no kernel for this GPU multiplies."""
    format = found.format if found is not None else None
    is_fp8 = isinstance(format, W8A8Spec) and format.numbers == "e4m3"
    what = f"quantization {asked}" if asked else "the checkpoint"
    if is_fp8 or (asked or "").startswith("fp8"):
        needed = FP8_ARCH
        works = "a plain checkpoint (with quantization int8 or nf4), AWQ, GPTQ, NVFP4 or int8"
    elif format == "mxfp4":
        return
    else:
        needed, works = _BF16_ARCH, "a plain checkpoint"
    if device.arch < needed:
        raise ConfigError(
            f"{what} needs GEMMs that begin with sm_{needed}; this is sm_{device.arch}, where "
            f"{works} works. On a CPU all of them do (device cpu)"
        )
