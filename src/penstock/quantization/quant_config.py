"""What a checkpoint says of its quantisation -> `QuantSpec`. Needs no torch.

Dialects that are understood: ModelOpt's (hf_quant_config.json, or quantization_config with
quant_method modelopt), transformers' fp8 and mxfp4, compressed-tensors, AWQ, GPTQ, auto-round's
name for both, and bitsandbytes. Each has one reader here; which scheme a layer gets is decided by
`choose.py`.
"""

import fnmatch
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from penstock.errors import ConfigError
from penstock.types.model_spec import CodesSpec, EightBitSpec, QuantSpec

FP8_CACHE = "float8_e4m3fn"
_BLOCK = [128, 128]
_NVFP4 = CodesSpec(layout="nvfp4", bits=4, group=16)
_MXFP4 = CodesSpec(layout="mxfp4", bits=4, group=32)
_SUPPORTED = (
    "8-bit floats (e4m3): static scales of whole tensors (ModelOpt FP8; fp8 and compressed-tensors "
    "with static activations), dynamic ones per token (ModelOpt FP8_PER_CHANNEL_PER_TOKEN; fp8 and "
    "compressed-tensors with dynamic activations), and blocks of 128 x 128 (weight_block_size); "
    "experts in MXFP4; 8-bit whole numbers with inputs of the same kind (compressed-tensors); "
    "weights alone of 4 or 8 bits (AWQ, GPTQ, auto-round, compressed-tensors, bitsandbytes nf4 and "
    "int8), in NVFP4 (ModelOpt, compressed-tensors), MXFP4 and 8-bit floats (compressed-tensors)"
)


def parse_quantization(raw: Mapping[str, Any]) -> QuantSpec | None:
    """`raw` is quantization_config, or its like in hf_quant_config.json; None where it is empty."""
    if not raw:
        return None
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
    """Whether the modules that make up one layer (their checkpoint names) are not quantised."""
    found = _found(spec, names)
    if any(found) and not all(found):
        raise ConfigError(
            f"the checkpoint quantises only some of {', '.join(names)}, which are multiplied as "
            "one matrix; this is not supported"
        )
    return all(found)


def any_excluded(spec: QuantSpec, names: Sequence[str]) -> bool:
    """The same, of parts that need not have a form in common."""
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
    cache_dtype = FP8_CACHE if raw.get("kv_cache_quant_algo") == "FP8" else _cache_dtype(raw)
    excluded = _patterns(raw, "exclude_modules", "ignore")
    if algorithm == "NVFP4":
        if (group := raw.get("group_size") or _NVFP4.group) != _NVFP4.group:
            raise _refusal(f"NVFP4, group_size {group}")
        return QuantSpec(format=None, codes=_NVFP4, excluded=excluded, cache_dtype=cache_dtype)
    formats = {
        None: None,
        "NO_QUANT": None,
        "FP8": EightBitSpec(weights="tensor", inputs="static"),
        "FP8_PER_CHANNEL_PER_TOKEN": EightBitSpec(weights="channel", inputs="row"),
    }
    if algorithm not in formats:
        raise _refusal(str(algorithm))
    return QuantSpec(format=formats[algorithm], excluded=excluded, cache_dtype=cache_dtype)


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
            chosen = EightBitSpec(weights="tensor", inputs="static")
        case "dynamic", None:
            chosen = EightBitSpec(weights="tensor", inputs="row")
        case "dynamic", list() if block == _BLOCK:
            chosen = EightBitSpec(weights="block", inputs="group", scale_name="weight_scale_inv")
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
    if (codes := _compressed_codes(raw, weights, inputs)) is not None:
        return QuantSpec(format=None, codes=codes, excluded=excluded, cache_dtype=cache_dtype)
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
            chosen = EightBitSpec(weights=strategy, inputs="static", numbers=numbers)
        case ("tensor" | "channel") as strategy, "token", True:
            chosen = EightBitSpec(weights=strategy, inputs="row", numbers=numbers)
        case "block", "group", True if (
            numbers == "e4m3"
            and weights.get("block_structure") == _BLOCK
            and inputs.get("group_size") == _BLOCK[1]
        ):
            chosen = EightBitSpec(weights="block", inputs="group")
        case _:
            raise _refusal(
                f"compressed-tensors, weights by {how[0]}, activations by {how[1]}, "
                + ("dynamic" if how[2] else "static")
            )
    return QuantSpec(format=chosen, excluded=excluded, cache_dtype=cache_dtype)


def _compressed_codes(
    raw: Mapping[str, Any], weights: Mapping[str, Any], inputs: Mapping[str, Any]
) -> CodesSpec | None:
    """Weights alone. Inputs that could be rounded to 4-bit floats, too, keep their 16 bits."""
    bits, strategy = weights.get("num_bits"), weights.get("strategy")
    if weights.get("type") == "float" and bits == 4:
        match strategy, weights.get("group_size"):
            case "tensor_group", _NVFP4.group:
                return _NVFP4
            case "group", _MXFP4.group:
                return _MXFP4
            case _, group:
                raise _refusal(f"compressed-tensors, 4-bit floats by {strategy} of {group}")
    if _is_fp8(weights) and not inputs:
        is_block = strategy == "block" and weights.get("block_structure") == _BLOCK
        if strategy not in ("tensor", "channel") and not is_block:
            raise _refusal(f"compressed-tensors, 8-bit floats by {strategy}, inputs as they are")
        return CodesSpec(layout="fp8", bits=8, group=_BLOCK[1] if is_block else 0)
    if weights.get("type") != "int" or inputs:
        return None
    if bits not in (4, 8) or strategy not in ("group", "channel"):
        raise _refusal(
            f"compressed-tensors, format {raw.get('format')}, whole numbers of {bits} bits by "
            f"{strategy}"
        )
    return CodesSpec(
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
    codes = CodesSpec(layout="awq", bits=4, group=max(group, 0), has_zeros=True)
    excluded = _patterns(raw, "modules_to_not_convert")
    return QuantSpec(format=None, codes=codes, excluded=excluded)


def _gptq(raw: Mapping[str, Any]) -> QuantSpec:
    bits, version = raw.get("bits"), raw.get("checkpoint_format", "gptq")
    if bits not in (4, 8) or version not in ("gptq", "gptq_v2"):
        raise _refusal(f"gptq, {bits} bits, checkpoint_format {version}")
    changed = [name for name in raw.get("dynamic") or {} if not name.startswith("-:")]
    if changed:
        raise _refusal(f"gptq, dynamic, {changed[0]}")
    left = [name.replace("-:", "re:", 1) for name in raw.get("dynamic") or {}]
    codes = CodesSpec(
        layout="gptq",
        bits=bits,
        group=max(int(raw.get("group_size", 128)), 0),
        has_zeros=not raw.get("sym", True),
        zero_offset=1 if version == "gptq" else 0,  # the first version stored one less
    )
    excluded = _patterns({"dynamic": left}, "dynamic")
    return QuantSpec(format=None, codes=codes, excluded=excluded)


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
        codes = CodesSpec(layout="bitsandbytes", bits=8, group=0)
    elif raw.get("load_in_4bit") and raw.get("bnb_4bit_quant_type") == "nf4":
        codes = CodesSpec(layout="bitsandbytes", bits=4, group=64)
    else:
        raise _refusal(f"bitsandbytes, {raw.get('bnb_4bit_quant_type', 'no number of bits')}")
    return QuantSpec(format=None, codes=codes, excluded=excluded)


def _is_int8(numbers: Mapping[str, Any]) -> bool:
    is_whole = numbers.get("num_bits") == 8 and numbers.get("type") == "int"
    return is_whole and bool(numbers.get("symmetric", True))


def _is_fp8(numbers: Mapping[str, Any]) -> bool:
    return numbers.get("num_bits") == 8 and numbers.get("type") == "float"


def _cache_dtype(raw: Mapping[str, Any]) -> str | None:
    """A cache of another format than fp8 is kept in the model's own dtype, which loses nothing."""
    cache = raw.get("kv_cache_scheme")
    is_fp8 = _is_fp8(cache) if isinstance(cache, Mapping) else cache == "static"
    return FP8_CACHE if is_fp8 else None


def _patterns(raw: Mapping[str, Any], *fields: str) -> tuple[str, ...]:
    found = tuple(pattern for field in fields for pattern in raw.get(field) or ())
    for pattern in found:
        try:
            re.compile(pattern.removeprefix("re:")) if pattern.startswith("re:") else None
        except re.error as error:
            raise ConfigError(
                f"the checkpoint excludes '{pattern}' from quantisation, which is no regular "
                f"expression: {error}"
            ) from error
    return found


def _refusal(what: str) -> ConfigError:
    return ConfigError(
        f"the checkpoint is quantised ({what}), which is not supported; supported are {_SUPPORTED}"
    )
