"""What a checkpoint says of its quantisation -> `QuantSpec`. Needs no torch.

Dialects that are understood: ModelOpt's (hf_quant_config.json, or quantization_config with
quant_method modelopt), transformers' fp8 and mxfp4, and compressed-tensors. Each has one reader
here; which scheme a layer gets is decided by `choose.py`.
"""

import fnmatch
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.errors import ConfigError
from penstock.types.model_spec import Fp8Spec, QuantSpec

FP8_CACHE = "float8_e4m3fn"
_BLOCK = [128, 128]
_SUPPORTED = (
    "8-bit floats (e4m3): static scales of whole tensors (ModelOpt FP8; fp8 and compressed-tensors "
    "with static activations), dynamic ones per token (ModelOpt FP8_PER_CHANNEL_PER_TOKEN; fp8 and "
    "compressed-tensors with dynamic activations), and blocks of 128 x 128 (weight_block_size); "
    "experts in MXFP4"
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
    raise _refusal(str(method))


def is_excluded(spec: QuantSpec, names: Sequence[str]) -> bool:
    """Whether the modules that make up one layer (their checkpoint names) are not quantised."""
    words, regular = _compiled(spec.excluded)
    found = [
        words.match(f".{name}.") is not None or any(pattern.match(name) for pattern in regular)
        for name in names
    ]
    if any(found) and not all(found):
        raise ConfigError(
            f"the checkpoint quantises only some of {', '.join(names)}, which are multiplied as "
            "one matrix; this is not supported"
        )
    return all(found)


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
    formats = {
        None: None,
        "NO_QUANT": None,
        "FP8": Fp8Spec(weights="tensor", inputs="static"),
        "FP8_PER_CHANNEL_PER_TOKEN": Fp8Spec(weights="channel", inputs="row"),
    }
    if algorithm not in formats:
        raise _refusal(str(algorithm))
    return QuantSpec(
        format=formats[algorithm],
        excluded=_patterns(raw, "exclude_modules", "ignore"),
        cache_dtype=FP8_CACHE if raw.get("kv_cache_quant_algo") == "FP8" else _cache_dtype(raw),
    )


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
            chosen = Fp8Spec(weights="tensor", inputs="static")
        case "dynamic", None:
            chosen = Fp8Spec(weights="tensor", inputs="row")
        case "dynamic", list() if block == _BLOCK:
            chosen = Fp8Spec(weights="block", inputs="group", scale_name="weight_scale_inv")
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
    if not _is_fp8(weights) or not _is_fp8(inputs):
        raise _refusal(f"compressed-tensors, format {raw.get('format')}")
    how = (weights.get("strategy"), inputs.get("strategy"), bool(inputs.get("dynamic")))
    match how:
        case ("tensor" | "channel") as strategy, "tensor", False:
            chosen = Fp8Spec(weights=strategy, inputs="static")
        case ("tensor" | "channel") as strategy, "token", True:
            chosen = Fp8Spec(weights=strategy, inputs="row")
        case "block", "group", True if (
            weights.get("block_structure") == _BLOCK and inputs.get("group_size") == _BLOCK[1]
        ):
            chosen = Fp8Spec(weights="block", inputs="group")
        case _:
            raise _refusal(
                f"compressed-tensors, weights by {how[0]}, activations by {how[1]}, "
                + ("dynamic" if how[2] else "static")
            )
    return QuantSpec(
        format=chosen, excluded=_patterns(raw, "ignore"), cache_dtype=_cache_dtype(raw)
    )


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
