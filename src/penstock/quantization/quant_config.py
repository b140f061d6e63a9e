"""A checkpoint's quantization config -> `QuantSpec`. Needs no torch.

Quantization methods that are understood: ModelOpt's (hf_quant_config.json, or quantization_config
with quant_method modelopt), transformers' fp8 and mxfp4, compressed-tensors, AWQ, GPTQ,
auto-round's name for both, and bitsandbytes. Each has one reader here; which scheme a layer gets is
decided by `choose.py`.
"""

import fnmatch
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from penstock.errors import ConfigError
from penstock.types.cache_spec import NVFP4
from penstock.types.model_spec import QuantPart, QuantSpec, W8A8Spec, WeightOnlySpec

FP8_CACHE = "float8_e4m3fn"
_CACHES = {"FP8": FP8_CACHE, "NVFP4": NVFP4}  # of ModelOpt
_BLOCK = [128, 128]
_NVFP4 = WeightOnlySpec(layout="nvfp4", bits=4, group=16)
_W4A4_NVFP4 = replace(_NVFP4, inputs="nvfp4")
_W4A8_GROUP = 128  # of which groups are multiples that are multiplied with FP8
_MXFP4 = WeightOnlySpec(layout="mxfp4", bits=4, group=32)
_SUPPORTED = (
    "FP8 (E4M3): static per-tensor scales (ModelOpt FP8; fp8 and compressed-tensors "
    "with static activations), dynamic per-token ones (ModelOpt FP8_PER_CHANNEL_PER_TOKEN; fp8 and "
    "compressed-tensors with dynamic activations), and blocks of 128 x 128 (weight_block_size); "
    "experts in MXFP4; INT8 weights and activations (compressed-tensors, ModelOpt "
    "W8A8_SQ_PER_CHANNEL); "
    "weight-only INT4 and INT8 (AWQ, GPTQ, auto-round, compressed-tensors, ModelOpt W4A16_AWQ and "
    "W4A8_AWQ, bitsandbytes nf4 and int8), in NVFP4 (ModelOpt NVFP4, NVFP4_AWQ and W4A8_NVFP4_FP8, "
    "compressed-tensors), MXFP4 (compressed-tensors) and FP8 (compressed-tensors, ModelOpt "
    "FP8_PB_WO); some layers in one and others in another (ModelOpt MIXED_PRECISION)"
)


def parse_quantization(raw: Mapping[str, Any]) -> QuantSpec | None:
    """`raw` is quantization_config, or its like in hf_quant_config.json; None where it is empty."""
    if not raw:
        return None
    try:
        return _parsed(raw)
    except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
        # Each reader below takes its fields for what they are in checkpoints of its kind.
        raise _refusal(f"{_shown(raw)}, which has a field of a wrong type: {error}") from error


def _parsed(raw: Mapping[str, Any]) -> QuantSpec:
    method = raw.get("quant_method") or ("modelopt" if "quant_algo" in raw else None)
    match method:
        case "modelopt":
            return _modelopt(raw)
        case "fp8":
            return _fp8(raw)
        case "compressed-tensors":
            return _compressed_tensors(raw)
        case "mxfp4":
            return QuantSpec(format="mxfp4", excluded=_patterns(raw, "modules_to_not_convert"))
        case "awq":
            return _awq(raw)
        case "gptq":
            return _gptq(raw)
        case "auto-round":
            return _auto_round(raw)
        case "bitsandbytes":
            return _bitsandbytes(raw)
    raise _refusal(str(method))


def is_excluded(spec: QuantSpec, names: Sequence[str]) -> bool:
    """Whether the modules that make up one layer (their checkpoint names) are not quantized."""
    found = _found(spec, names)
    if any(found) and not all(found):
        raise ConfigError(
            f"the checkpoint quantizes only some of {', '.join(names)}, which are multiplied as "
            "one matrix; this is not supported"
        )
    return all(found)


def any_excluded(spec: QuantSpec, names: Sequence[str]) -> bool:
    """The same, of parts that may have different formats."""
    return any(_found(spec, names))


def _found(spec: QuantSpec, names: Sequence[str]) -> list[bool]:
    words, regular = _compiled(spec.excluded)
    return [
        words.match(f".{name}.") is not None or any(pattern.match(name) for pattern in regular)
        for name in names
    ]


@functools.cache
def _compiled(patterns: tuple[str, ...]) -> tuple[re.Pattern[str], tuple[re.Pattern[str], ...]]:
    """Whole words of a name, with wildcards; and the regular expressions, those after "re:".

    The former as one: a checkpoint may exclude hundreds of modules, and have thousands of experts.
    """
    words = [fnmatch.translate(f"*.{p}.*") for p in patterns if not p.startswith("re:")]
    regular = [p.removeprefix("re:") for p in patterns if p.startswith("re:")]
    return re.compile("|".join(words) or "(?!)"), tuple(map(re.compile, regular))


def _modelopt(raw: Mapping[str, Any]) -> QuantSpec:
    algorithm = raw.get("quant_algo")
    cache_algorithm = raw.get("kv_cache_quant_algo")
    cache_dtype = _cache_dtype(raw)
    if cache_algorithm not in (None, "NO_QUANT"):  # what becomes of it is up to the setting
        cache_dtype = _CACHES.get(str(cache_algorithm), str(cache_algorithm))
    excluded = _patterns(raw, "exclude_modules", "ignore")
    found = _mixed(raw) if algorithm == "MIXED_PRECISION" else _modelopt_format(algorithm, raw)
    return replace(found, excluded=excluded, cache_dtype=cache_dtype)


def _mixed(raw: Mapping[str, Any]) -> QuantSpec:
    """Modules that are not listed are not quantized."""
    layers = raw.get("quantized_layers")
    if not isinstance(layers, Mapping) or not layers:
        raise _refusal("MIXED_PRECISION without quantized_layers, which say what each layer is")
    modules: dict[QuantSpec, list[str]] = {}
    for name, how in layers.items():
        found = _modelopt_format(how.get("quant_algo"), how)
        if found.is_quantized:
            modules.setdefault(found, []).append(name)
    parts = [QuantPart(modules=tuple(names), spec=spec) for spec, names in modules.items()]
    return QuantSpec(format=None, mixed=tuple(parts))


def _modelopt_format(algorithm: str | None, raw: Mapping[str, Any]) -> QuantSpec:
    """NVFP4 weights are weight-only where activations could be FP8."""
    name = None if algorithm is None else str(algorithm).upper()
    match name:
        case None | "NO_QUANT":
            return QuantSpec(format=None)
        case "FP8":
            return QuantSpec(format=W8A8Spec(weights="tensor", inputs="static"))
        case "FP8_PER_CHANNEL_PER_TOKEN":
            return QuantSpec(format=W8A8Spec(weights="channel", inputs="row"))
        case "W8A8_SQ_PER_CHANNEL":
            chosen = W8A8Spec(weights="channel", inputs="static", numbers="int8")
            return QuantSpec(format=chosen, has_input_scales=True)
        case "FP8_PB_WO" if (group := _modelopt_group(raw, _BLOCK[1])) == _BLOCK[1]:
            spec = WeightOnlySpec(layout="fp8", bits=8, group=group)
            return QuantSpec(format=None, weight_only=spec)
        case "NVFP4" | "NVFP4_AWQ" | "W4A8_NVFP4_FP8" if (
            _modelopt_group(raw, _NVFP4.group) == _NVFP4.group
        ):
            spec = _NVFP4 if name == "W4A8_NVFP4_FP8" else _W4A4_NVFP4
            return QuantSpec(format=None, weight_only=spec, has_input_scales=name == "NVFP4_AWQ")
        case "W4A16_AWQ" | "W4A8_AWQ" if not raw.get("has_zero_point"):
            if (group := _modelopt_group(raw, 128)) > 0:
                spec = WeightOnlySpec(layout="modelopt", bits=4, group=group)
                if name == "W4A8_AWQ" and group % _W4A8_GROUP == 0:
                    spec = replace(spec, inputs="fp8")
                return QuantSpec(format=None, weight_only=spec, has_input_scales=True)
    details = [
        f"{field} {raw[field]!s:.40}" for field in ("group_size", "has_zero_point") if field in raw
    ]
    raise _refusal(", ".join([f"{algorithm!s:.60}", *details]))


def _modelopt_group(raw: Mapping[str, Any], usual: int) -> int:
    """As hf_quant_config.json says it, or config.json."""
    groups = (raw.get("config_groups") or {}).values()
    stated = [(group.get("weights") or {}).get("group_size") for group in groups]
    found = next((size for size in (raw.get("group_size"), *stated) if size), usual)
    return int(found)


def _fp8(raw: Mapping[str, Any]) -> QuantSpec:
    if (number := raw.get("fmt", "e4m3")) != "e4m3":
        raise _refusal(f"fp8, fmt {number}")
    # ue8m0: scales are powers of two. Those of weights are used as they are stored; those of inputs
    # are not rounded to them, which is no less precise.
    if (scales := raw.get("scale_fmt", "float")) not in ("float", "ue8m0"):
        raise _refusal(f"fp8, scale_fmt {scales}")
    activations, block = raw.get("activation_scheme", "dynamic"), raw.get("weight_block_size")
    match activations, block:
        case "static", None:
            chosen = W8A8Spec(weights="tensor", inputs="static")
        case "dynamic", None:
            chosen = W8A8Spec(weights="tensor", inputs="row")
        case "dynamic", list() if block == _BLOCK:
            chosen = W8A8Spec(weights="block", inputs="group", scale_name="weight_scale_inv")
        case _:
            raise _refusal(f"fp8, activation_scheme {activations}, weight_block_size {block}")
    return QuantSpec(
        format=chosen,
        excluded=_patterns(raw, "modules_to_not_convert", "ignored_layers"),
        cache_dtype=_cache_dtype(raw),
    )


def _compressed_tensors(raw: Mapping[str, Any]) -> QuantSpec:
    groups = list((raw.get("config_groups") or {}).values())
    if len(groups) != 1 or groups[0].get("targets") != ["Linear"]:
        raise _refusal(f"compressed-tensors with {len(groups)} groups, or not of all linear layers")
    weights, inputs = groups[0].get("weights") or {}, groups[0].get("input_activations") or {}
    excluded, cache_dtype = _patterns(raw, "ignore"), _cache_dtype(raw)
    if (spec := _compressed_weight_only(raw, weights, inputs)) is not None:
        return QuantSpec(format=None, weight_only=spec, excluded=excluded, cache_dtype=cache_dtype)
    numbers: Literal["e4m3", "int8"]
    if _is_fp8(weights) and _is_fp8(inputs):
        numbers = "e4m3"
    elif _is_int8(weights) and _is_int8(inputs):
        numbers = "int8"
    else:
        raise _refusal(f"compressed-tensors, format {raw.get('format')}")
    how = (weights.get("strategy"), inputs.get("strategy"), bool(inputs.get("dynamic")))
    match how:
        case ("tensor" | "channel") as strategy, "tensor", False:
            chosen = W8A8Spec(weights=strategy, inputs="static", numbers=numbers)
        case ("tensor" | "channel") as strategy, "token", True:
            chosen = W8A8Spec(weights=strategy, inputs="row", numbers=numbers)
        case "block", "group", True if (
            numbers == "e4m3"
            and weights.get("block_structure") == _BLOCK
            and inputs.get("group_size") == _BLOCK[1]
        ):
            chosen = W8A8Spec(weights="block", inputs="group")
        case _:
            raise _refusal(
                f"compressed-tensors, weights by {how[0]}, activations by {how[1]}, "
                + ("dynamic" if how[2] else "static")
            )
    return QuantSpec(format=chosen, excluded=excluded, cache_dtype=cache_dtype)


def _compressed_weight_only(
    raw: Mapping[str, Any], weights: Mapping[str, Any], inputs: Mapping[str, Any]
) -> WeightOnlySpec | None:
    """Weight-only, also where integers have activations of 8 bits."""
    bits, strategy = weights.get("num_bits"), weights.get("strategy")
    if weights.get("type") == "float" and bits == 4:
        match strategy, weights.get("group_size"):
            case "tensor_group", _NVFP4.group:
                return _W4A4_NVFP4 if inputs.get("num_bits") == 4 else _NVFP4
            case "group", _MXFP4.group:
                is_mxfp8 = _is_fp8(inputs) and inputs.get("group_size") == _MXFP4.group
                return replace(_MXFP4, inputs="mxfp8") if is_mxfp8 else _MXFP4
            case _, group:
                raise _refusal(f"compressed-tensors, FP4 by {strategy} of {group}")
    if _is_fp8(weights) and not inputs:
        is_block = strategy == "block" and weights.get("block_structure") == _BLOCK
        if strategy not in ("tensor", "channel") and not is_block:
            raise _refusal(f"compressed-tensors, weight-only FP8 by {strategy}")
        return WeightOnlySpec(layout="fp8", bits=8, group=_BLOCK[1] if is_block else 0)
    if weights.get("type") != "int" or inputs:
        return None
    if bits not in (4, 8) or strategy not in ("group", "channel"):
        raise _refusal(f"compressed-tensors, format {raw.get('format')}, INT{bits} by {strategy}")
    return WeightOnlySpec(
        layout="packed",
        bits=bits,
        group=int(weights["group_size"]) if strategy == "group" else 0,
        has_zeros=not weights.get("symmetric", True),
    )


def _awq(raw: Mapping[str, Any]) -> QuantSpec:
    bits, version = raw.get("bits", raw.get("w_bit")), str(raw.get("version", "gemm")).lower()
    if bits != 4 or version != "gemm":
        raise _refusal(f"awq, {bits} bits, version {version}")
    group = int(raw.get("group_size", raw.get("q_group_size", 128)))
    spec = WeightOnlySpec(layout="awq", bits=4, group=max(group, 0), has_zeros=True)
    excluded = _patterns(raw, "modules_to_not_convert")
    return QuantSpec(format=None, weight_only=spec, excluded=excluded)


def _gptq(raw: Mapping[str, Any]) -> QuantSpec:
    bits, version = raw.get("bits"), raw.get("checkpoint_format", "gptq")
    if bits not in (4, 8) or version not in ("gptq", "gptq_v2"):
        raise _refusal(f"gptq, {bits} bits, checkpoint_format {version}")
    changed = [name for name in raw.get("dynamic") or {} if not name.startswith("-:")]
    if changed:
        raise _refusal(f"gptq, dynamic, {changed[0]}")
    left = [name.replace("-:", "re:", 1) for name in raw.get("dynamic") or {}]
    spec = WeightOnlySpec(
        layout="gptq",
        bits=bits,
        group=max(int(raw.get("group_size", 128)), 0),
        has_zeros=not raw.get("sym", True),
        zero_offset=1 if version == "gptq" else 0,  # the first version stored one less
    )
    excluded = _patterns({"dynamic": left}, "dynamic")
    return QuantSpec(format=None, weight_only=spec, excluded=excluded)


def _auto_round(raw: Mapping[str, Any]) -> QuantSpec:
    """auto-round's own name for a checkpoint in the layout of GPTQ or AWQ."""
    packing, layers = str(raw.get("packing_format", "")), raw.get("extra_config") or {}
    changed = [name for name, how in layers.items() if how.get("bits", 16) < 16]
    match packing.removeprefix("auto_round:"):
        case "auto_gptq" if not changed:
            found = _gptq(raw)
        case "auto_awq" if not changed:
            found = _awq({"bits": raw.get("bits"), "group_size": raw.get("group_size", 128)})
        case _:
            raise _refusal(f"auto-round, packing_format {packing}" + ", by layer" * bool(changed))
    return replace(found, excluded=(*found.excluded, *layers))


def _bitsandbytes(raw: Mapping[str, Any]) -> QuantSpec:
    excluded = _patterns(raw, "llm_int8_skip_modules")
    if raw.get("load_in_8bit"):
        spec = WeightOnlySpec(layout="bitsandbytes", bits=8, group=0)
    elif raw.get("load_in_4bit") and raw.get("bnb_4bit_quant_type") == "nf4":
        spec = WeightOnlySpec(layout="bitsandbytes", bits=4, group=64)
    else:
        raise _refusal(f"bitsandbytes, {raw.get('bnb_4bit_quant_type', 'no number of bits')}")
    return QuantSpec(format=None, weight_only=spec, excluded=excluded)


def _is_int8(numbers: Mapping[str, Any]) -> bool:
    is_int8 = numbers.get("num_bits") == 8 and numbers.get("type") == "int"
    return is_int8 and bool(numbers.get("symmetric", True))


def _is_fp8(numbers: Mapping[str, Any]) -> bool:
    return numbers.get("num_bits") == 8 and numbers.get("type") == "float"


def _cache_dtype(raw: Mapping[str, Any]) -> str | None:
    """The KV cache that the checkpoint is made for: FP8 with a static scale per layer, or another
    one in words. What becomes of it is up to kv_cache_config.dtype."""
    cache = raw.get("kv_cache_scheme")
    if not cache:
        return None
    if not isinstance(cache, Mapping):
        return FP8_CACHE if cache == "static" else f"'{cache!s:.40}'"
    strategy = cache.get("strategy") or "tensor"
    traits = [
        "dynamic" if cache.get("dynamic") else "",
        "" if cache.get("symmetric", True) else "asymmetric",
        _number_format(cache),
        "" if strategy == "tensor" else f"by {strategy!s:.40}",
    ]
    named = " ".join(filter(None, traits))
    return FP8_CACHE if named == "FP8" else named


def _number_format(numbers: Mapping[str, Any]) -> str:
    kind = numbers.get("type", "int")
    return f"{'FP' if kind == 'float' else f'{kind!s:.40}'.upper()}{numbers.get('num_bits')!s:.40}"


def _patterns(raw: Mapping[str, Any], *fields: str) -> tuple[str, ...]:
    found = tuple(pattern for field in fields for pattern in raw.get(field) or ())
    for pattern in found:
        if not isinstance(pattern, str):
            raise TypeError(f"{' and '.join(fields)} must list names of modules")
        try:
            re.compile(pattern.removeprefix("re:")) if pattern.startswith("re:") else None
        except re.error as error:
            raise ConfigError(
                f"the checkpoint excludes '{pattern}' from quantization, which is no regular "
                f"expression: {error}"
            ) from error
    return found


def _shown(raw: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} {raw[name]!s:.40}" for name in ("quant_method", "bits") if name in raw
    )


def _refusal(what: str) -> ConfigError:
    return ConfigError(
        f"the checkpoint is quantized ({what}), which is not supported; supported are {_SUPPORTED}"
    )
