"""config.json and generation_config.json, or the head of a GGUF file -> `ModelSpec`.

Understands what transformers 4 writes (rope_theta, rope_scaling, torch_dtype) and what 5 does
(rope_parameters, dtype). Fields that a file leaves out have the default of their model type, which
its `Family` knows. Needs no torch.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock.hub.files import read_json
from penstock.hub.gguf_file import GgufFile, is_gguf
from penstock.models.family import Family
from penstock.models.fields import Fields
from penstock.models.gguf_config import config_of
from penstock.models.registry import find_family, supported_architectures
from penstock.models.rope_config import read_rope, read_window_rope
from penstock.quantization.quant_config import parse_quantization
from penstock.types.model_spec import ModelSpec, QuantSpec, RopeSpec

_MAX_LAYERS = 1 << 12  # far more than any model has
_DTYPES = ("bfloat16", "float16", "float32")


def parse_model_spec(folder: Path, overrides: Mapping[str, Any] | None = None) -> ModelSpec:
    """`overrides` replaces fields of config.json, nested ones key by key, before it is read."""
    read = config_of(GgufFile(folder)) if is_gguf(folder) else read_json(folder / "config.json")
    raw = _of_text(read)
    config = Fields(folder, _merged(raw, _of_text(overrides or {})))
    file = "generation_config.json"
    generation = Fields(folder, _beside(folder, file), file)
    family = _family(config)

    hidden_size, num_heads = (
        config.count("hidden_size"),
        config.count("num_attention_heads", family.num_heads),
    )
    num_kv_heads = config.count("num_key_value_heads", family.num_kv_heads or num_heads)
    if num_heads % num_kv_heads:
        config.refuse("num_key_value_heads", f"{num_kv_heads} does not divide {num_heads} heads")
    name = family.activation_field
    activation = config.one_of(name, config.get(name, family.activation), (family.activation,))
    latent = None if family.latent is None else family.latent(config)
    num_nextn_predict_layers = 0
    if (usual := family.num_nextn_predict_layers) is not None:
        num_nextn_predict_layers = config.count("num_nextn_predict_layers", usual, least=0)
    head_size = (
        config.count("head_dim", family.head_size or hidden_size // num_heads)
        if latent is None
        else latent.rope_size
    )
    max_position = config.count("max_position_embeddings", family.max_position)
    num_layers = config.count("num_hidden_layers", most=_MAX_LAYERS)
    vocab_size = config.count("vocab_size", family.vocab_size)
    windows = family.windows(config, num_layers)
    attention_bias = config.flag("attention_bias", family.attention_bias)
    qkv_bias = attention_bias if family.qkv_bias is None else family.qkv_bias
    if family.reads_qkv_bias:
        qkv_bias = config.flag("qkv_bias", qkv_bias)
    original = raw.get("max_position_embeddings")
    if not isinstance(original, int) or original < 1:  # an override may stand for it
        original = max_position
    rope, max_position = read_rope(config, family, head_size, max_position, original)
    window_rope = read_window_rope(config, family)
    if family.rotates_windows_only:
        rope, window_rope = RopeSpec(kind="none"), rope

    spec = ModelSpec(
        architecture=family.architecture,
        model_type=config.text("model_type"),
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=config.count("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        max_position=max_position,
        norm_eps=config.number("rms_norm_eps", family.norm_eps, above=0.0),
        hidden_act=activation,
        rope=rope,
        tie_embeddings=config.flag("tie_word_embeddings", family.tie_embeddings),
        attention_bias=qkv_bias,
        attention_out_bias=attention_bias if family.out_bias is None else family.out_bias,
        mlp_bias=config.flag("mlp_bias", False) if family.mlp_bias is None else family.mlp_bias,
        qk_norm=family.qk_norm,
        zero_centered_norms=family.zero_centered_norms,
        sandwich_norms=family.sandwich_norms,
        latent=latent,
        delta=None if family.delta is None else family.delta(config, num_layers),
        num_nextn_predict_layers=num_nextn_predict_layers,
        window=next((window for window in windows if window is not None), None),
        layer_windows=windows,
        window_rope=window_rope,
        dtype=_dtype(config),
        bos_token_id=_bos_id(config, family),
        eos_token_ids=_eos_ids(generation, config, family, vocab_size),
        pad_token_id=_pad_id(config if config.get("pad_token_id") is not None else generation),
        quantization=_quantization(folder, config),
        moe=None if family.moe is None else family.moe(config, num_layers),
    )
    return spec if family.further is None else replace(spec, **family.further(config))


def _of_text(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """A model of text and images describes its language model one level down."""
    if not isinstance(text := fields.get("text_config"), Mapping):
        return fields
    own = {name: value for name, value in fields.items() if name in ("architectures", "model_type")}
    stated = {name: value for name, value in text.items() if value is not None}
    return {**fields, **stated, **own}


def _beside(folder: Path, file: str) -> dict[str, Any]:
    """A further file of the folder, or nothing. A GGUF file has all in itself."""
    return {} if is_gguf(folder) else read_json(folder / file, optional=True)


def _merged(fields: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(fields)
    for name, value in overrides.items():
        both_nested = isinstance(value, Mapping) and isinstance(merged.get(name), Mapping)
        merged[name] = _merged(merged[name], value) if both_nested else value
    return merged


def _family(config: Fields) -> Family:
    """By architecture name; by model type where a file names no architecture."""
    names = config.texts("architectures") or []
    model_type = config.text("model_type")
    family = find_family(names, model_type)
    if family is None:
        raise ConfigError(
            f"config.json of '{config.folder}': architecture '{', '.join(names) or model_type}' "
            f"is not supported; supported are {', '.join(supported_architectures())}"
        )
    return family


def _dtype(config: Fields) -> str:
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    dtype = dtype.removeprefix("torch.")
    if dtype not in _DTYPES:
        config.refuse("dtype", f"'{dtype}' is not supported; there are {', '.join(_DTYPES)}")
    return dtype


def _bos_id(config: Fields, family: Family) -> int | None:
    if config.has("bos_token_id"):  # absent and null differ
        return _one_id(config, "bos_token_id")
    return family.bos


def _pad_id(config: Fields) -> int | None:
    return _one_id(config, "pad_token_id")


def _one_id(config: Fields, name: str) -> int | None:
    """-1 and ids beyond the vocabulary are found in the wild; nothing computes with these two."""
    return None if config.get(name) is None else config.count(name, least=-1)


def _eos_ids(
    generation: Fields, config: Fields, family: Family, vocab_size: int
) -> tuple[int, ...]:
    """Those of both files: either may forget the end-of-turn token. One that the vocabulary lacks
    never comes, and to forbid it (`min_tokens`) would reach beyond the logits."""
    found = generation.ids("eos_token_id") + config.ids("eos_token_id")
    if not config.has("eos_token_id") and family.eos is not None:  # absent and null differ
        found += (family.eos,)
    return tuple(dict.fromkeys(token_id for token_id in found if token_id < vocab_size))


def _quantization(folder: Path, config: Fields) -> QuantSpec | None:
    file = "hf_quant_config.json"
    beside = Fields(folder, _beside(folder, file), file).mapping("quantization")
    return parse_quantization(config.mapping("quantization_config") or beside)
