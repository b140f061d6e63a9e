"""config.json and generation_config.json, or the head of a GGUF file -> `ModelSpec`.

Understands what transformers 4 writes (rope_theta, rope_scaling, torch_dtype) and what 5 does
(rope_parameters, dtype). Fields that a file leaves out have the default of their model type.
Needs no torch.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock.hub.gguf import GgufFile, is_gguf
from penstock.models.gguf import config_of
from penstock.models.registry import supported_architectures
from penstock.quant.parse import parse_quantization
from penstock.types.model_spec import (
    DeltaSpec,
    LatentSpec,
    ModelSpec,
    MoeSpec,
    QuantSpec,
    RopeSpec,
)

_ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Experts:
    """The same, of fields about experts."""

    num_experts: int
    num_active: int
    inner_size: int | None = None  # None: the width of the model's MLPs
    shared_size: int = 0
    renormalize: bool | None = None  # None: as `norm_topk_prob` says
    norm_topk: bool = False  # where that says nothing
    gate_limit: float | None = None  # where `swiglu_limit` says nothing; None: there is never one


@dataclass(frozen=True, slots=True, kw_only=True)
class _Deepseek:
    """The same, of fields that DeepSeek's models have."""

    num_dense_layers: int
    num_draft_layers: int
    score: str
    scale: float
    num_shared: int
    num_experts: int
    num_active: int | None
    inner_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """What a model type means by a field that its config.json leaves out, and what it fixes."""

    architecture: str
    max_position: int = 32768
    num_kv_heads: int | None = 32  # None: as many as query heads
    head_size: int | None = None  # None: hidden size / heads
    bos: int | None = None
    eos: int | None = None
    qkv_bias: bool | None = None  # where `qkv_bias` does not; None: as `attention_bias` says
    out_bias: bool | None = None
    attention_bias: bool = False  # where `attention_bias` says nothing
    mlp_bias: bool | None = False
    qk_norm: bool = False
    windows: str = "by layer"  # or "none", "all layers", "all layers if used", "every second"
    window: int | None = 4096  # of all layers, where the file does not even say null
    windows_alternate: bool = False  # every second one below max_window_layers, not those above
    rotated: float | None = None  # share of a head where the file says none; None: always all
    norm_eps: float = 1e-6
    rope: Mapping[str, Any] = field(default_factory=dict)  # where the file says nothing of it
    has_delta: bool = False  # most of its layers have a gated delta net, no attention
    zero_centred_norms: bool = False
    experts: _Experts | None = None  # None: the model has none
    deepseek: _Deepseek | None = None  # it has latent attention, and experts of its own kind


_FAMILIES = {
    "deepseek_v2": _Family(
        architecture="DeepseekV2ForCausalLM",
        max_position=2048,
        num_kv_heads=None,
        bos=1,
        eos=2,
        windows="none",
        deepseek=_Deepseek(
            num_dense_layers=0,
            num_draft_layers=0,
            score="softmax",
            scale=1.0,
            num_shared=2,
            num_experts=64,
            num_active=None,
            inner_size=1407,
        ),
    ),
    "deepseek_v3": _Family(
        architecture="DeepseekV3ForCausalLM",
        max_position=4096,
        num_kv_heads=None,
        bos=0,
        eos=1,
        windows="none",
        deepseek=_Deepseek(
            num_dense_layers=3,
            num_draft_layers=1,
            score="sigmoid",
            scale=2.5,
            num_shared=1,
            num_experts=256,
            num_active=8,
            inner_size=2048,
        ),
    ),
    "gpt_oss": _Family(
        architecture="GptOssForCausalLM",
        max_position=131072,
        num_kv_heads=8,
        head_size=64,
        attention_bias=True,
        windows="every second",
        window=128,
        norm_eps=1e-5,
        rope={
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        experts=_Experts(num_experts=128, num_active=4, renormalize=True, gate_limit=7.0),
    ),
    "llama": _Family(
        architecture="LlamaForCausalLM",
        max_position=2048,
        num_kv_heads=None,
        bos=1,
        eos=2,
        mlp_bias=None,
        windows="none",
    ),
    "mistral": _Family(
        architecture="MistralForCausalLM",
        max_position=131072,
        num_kv_heads=8,
        bos=1,
        eos=2,
        qkv_bias=False,
        out_bias=False,
        windows="all layers",
    ),
    "mixtral": _Family(
        architecture="MixtralForCausalLM",
        max_position=131072,
        num_kv_heads=8,
        bos=1,
        eos=2,
        qkv_bias=False,
        out_bias=False,
        windows="all layers",
        window=None,
        experts=_Experts(num_experts=8, num_active=2, renormalize=True),
    ),
    "qwen2": _Family(architecture="Qwen2ForCausalLM", qkv_bias=True, out_bias=False),
    "qwen2_moe": _Family(
        architecture="Qwen2MoeForCausalLM",
        num_kv_heads=16,
        qkv_bias=True,
        out_bias=False,
        windows_alternate=True,
        experts=_Experts(num_experts=60, num_active=4, inner_size=1408, shared_size=5632),
    ),
    "qwen3": _Family(architecture="Qwen3ForCausalLM", head_size=128, qk_norm=True),
    "qwen3_moe": _Family(
        architecture="Qwen3MoeForCausalLM",
        num_kv_heads=4,
        qk_norm=True,
        windows="all layers if used",
        experts=_Experts(num_experts=128, num_active=8, inner_size=768),
    ),
    "qwen3_next": _Family(
        architecture="Qwen3NextForCausalLM",
        num_kv_heads=2,
        head_size=256,
        qk_norm=True,
        windows="none",
        rotated=0.25,
        has_delta=True,
        zero_centred_norms=True,
        experts=_Experts(
            num_experts=512, num_active=10, inner_size=512, shared_size=512, norm_topk=True
        ),
    ),
}


def parse_model_spec(folder: Path, overrides: Mapping[str, Any] | None = None) -> ModelSpec:
    """`overrides` replaces fields of config.json, nested ones key by key, before it is read."""
    raw = config_of(GgufFile(folder)) if is_gguf(folder) else _read_json(folder / "config.json")
    original_max_position = raw.get("max_position_embeddings")
    config = _Fields(folder, _merged(raw, overrides or {}))
    generation = _read_json(folder / "generation_config.json", optional=True)
    family = _family(config)

    hidden_size, num_heads = config.count("hidden_size"), config.count("num_attention_heads")
    num_kv_heads = config.count("num_key_value_heads", family.num_kv_heads or num_heads)
    if num_heads % num_kv_heads:
        config.refuse("num_key_value_heads", f"{num_kv_heads} does not divide {num_heads} heads")
    if (activation := config.get("hidden_act", "silu")) != "silu":
        config.refuse("hidden_act", f"'{activation}' is not supported, only 'silu'")
    latent, num_draft_layers = None, 0
    if family.deepseek is not None:
        latent = _latent(config)
        num_draft_layers = config.count(
            "num_nextn_predict_layers", family.deepseek.num_draft_layers, least=0
        )
    head_size = (
        config.count("head_dim", family.head_size or hidden_size // num_heads)
        if latent is None
        else latent.rope_size
    )
    max_position = config.count("max_position_embeddings", family.max_position)
    num_layers = config.count("num_hidden_layers")
    windows = _windows(config, family, num_layers)
    attention_bias = bool(config.get("attention_bias", family.attention_bias))
    qkv_bias = config.get("qkv_bias", family.qkv_bias)
    rope, max_position = _rope(config, family, max_position, original_max_position or max_position)

    return ModelSpec(
        architecture=family.architecture,
        model_type=config.get("model_type", ""),
        vocab_size=config.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.count("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        max_position=max_position,
        norm_eps=config.number("rms_norm_eps", family.norm_eps),
        hidden_act=activation,
        rope=rope,
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=attention_bias if qkv_bias is None else bool(qkv_bias),
        attention_out_bias=attention_bias if family.out_bias is None else family.out_bias,
        mlp_bias=bool(
            config.get("mlp_bias", False) if family.mlp_bias is None else family.mlp_bias
        ),
        qk_norm=family.qk_norm,
        zero_centred_norms=family.zero_centred_norms,
        latent=latent,
        delta=_delta(config, num_layers) if family.has_delta else None,
        num_draft_layers=num_draft_layers,
        window=next((window for window in windows if window is not None), None),
        layer_windows=windows,
        dtype=_dtype(config),
        bos_token_id=config.fields.get("bos_token_id", family.bos),
        eos_token_ids=_eos_ids(generation, config, family),
        pad_token_id=config.get("pad_token_id", generation.get("pad_token_id")),
        quantization=_quantization(folder, config),
        moe=_moe(config, family, num_layers),
    )


class _Fields:
    """A config.json whose fields are checked as they are read. A null is as good as absent."""

    def __init__(self, folder: Path, fields: dict[str, Any]) -> None:
        self.folder = folder
        self.fields = fields

    def refuse(self, name: str, why: str) -> None:
        raise ConfigError(f"config.json of '{self.folder}': {name}: {why}")

    def has(self, name: str) -> bool:
        return name in self.fields

    def get(self, name: str, default: Any = None) -> Any:
        value = self.fields.get(name)
        return default if value is None else value

    def count(self, name: str, default: int | None = None, least: int = 1) -> int:
        value = self.get(name, default)
        if value is None:
            self.refuse(name, "is missing")
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            kind = "positive whole number" if least == 1 else f"whole number from {least} on"
            self.refuse(name, f"is {value!r}, it must be a {kind}")
        return int(value)

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name, default)
        if value is None:
            self.refuse(name, "is missing")
        if not isinstance(value, int | float) or isinstance(value, bool):
            self.refuse(name, f"is {value!r}, it must be a number")
        return float(value)


def _read_json(path: Path, optional: bool = False) -> dict[str, Any]:
    if optional and not path.is_file():
        return {}
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read '{path}': {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"'{path}' holds no JSON object")
    return fields


def _merged(fields: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(fields)
    for name, value in overrides.items():
        both_nested = isinstance(value, Mapping) and isinstance(merged.get(name), Mapping)
        merged[name] = _merged(merged[name], value) if both_nested else value
    return merged


def _family(config: _Fields) -> _Family:
    """By architecture name; by model type where a file names no architecture."""
    names = config.get("architectures", [])
    for family in _FAMILIES.values():
        if family.architecture in names:
            return family
    model_type = config.get("model_type")
    if not names and model_type in _FAMILIES:
        return _FAMILIES[model_type]
    raise ConfigError(
        f"config.json of '{config.folder}': architecture {', '.join(names) or model_type} is not "
        f"supported; supported are {', '.join(supported_architectures())}"
    )


def _latent(config: _Fields) -> LatentSpec:
    q_rank = None
    if config.fields.get("q_lora_rank", 1536) is not None:  # absent and null differ
        q_rank = config.count("q_lora_rank", 1536)
    elif config.get("attention_bias", False):
        config.refuse("attention_bias", "is not supported for queries without a latent")
    return LatentSpec(
        kv_rank=config.count("kv_lora_rank", 512),
        q_rank=q_rank,
        nope_size=config.count("qk_nope_head_dim", 128),
        rope_size=config.count("qk_rope_head_dim", 64),
        value_size=config.count("v_head_dim", 128),
        is_interleaved=bool(config.get("rope_interleave", True)),
    )


def _delta(config: _Fields, num_layers: int) -> DeltaSpec:
    interval = config.count("full_attention_interval", 4)
    kinds = config.get("layer_types")
    if kinds is None:
        kinds = [
            "full_attention" if (layer + 1) % interval == 0 else "linear_attention"
            for layer in range(num_layers)
        ]
    known = {"linear_attention", "full_attention"}
    if len(kinds) != num_layers or set(kinds) != known:
        config.refuse(
            "layer_types",
            f"is {kinds}, it must name {num_layers} layers, some linear_attention and some "
            "full_attention",
        )
    num_key_heads = config.count("linear_num_key_heads", 16)
    num_value_heads = config.count("linear_num_value_heads", 32)
    if num_value_heads % num_key_heads:
        config.refuse(
            "linear_num_value_heads",
            f"{num_value_heads} is no multiple of {num_key_heads} key heads",
        )
    return DeltaSpec(
        layers=tuple(kind == "linear_attention" for kind in kinds),
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_size=config.count("linear_key_head_dim", 128),
        value_size=config.count("linear_value_head_dim", 128),
        conv_width=config.count("linear_conv_kernel_dim", 4, least=2),
    )


def _deepseek_moe(config: _Fields, defaults: _Deepseek, num_layers: int) -> MoeSpec:
    num_dense = config.count("first_k_dense_replace", defaults.num_dense_layers, least=0)
    if (every := config.count("moe_layer_freq", 1)) != 1:
        config.refuse("moe_layer_freq", f"is {every}, only 1 is supported")
    if (score := config.get("scoring_func", defaults.score)) != defaults.score:
        config.refuse("scoring_func", f"is '{score}', only '{defaults.score}' is supported")
    is_corrected = score == "sigmoid"
    methods = ("noaux_tc",) if is_corrected else ("greedy", "group_limited_greedy")
    if (method := config.get("topk_method", methods[0])) not in methods:
        config.refuse("topk_method", f"is '{method}', only {' and '.join(methods)} are supported")
    has_groups = method != "greedy"
    inner_size = config.count("moe_intermediate_size", defaults.inner_size)
    return MoeSpec(
        layers=tuple(layer >= num_dense for layer in range(num_layers)),
        num_experts=config.count("n_routed_experts", defaults.num_experts),
        num_active=config.count("num_experts_per_tok", defaults.num_active),
        inner_size=inner_size,
        renormalize=is_corrected and bool(config.get("norm_topk_prob", True)),
        score=score,
        scale=config.number("routed_scaling_factor", defaults.scale),
        num_groups=config.count("n_group", 8 if is_corrected else None) if has_groups else 1,
        num_active_groups=(
            config.count("topk_group", 4 if is_corrected else None) if has_groups else 1
        ),
        num_best=2 if is_corrected else 1,
        shared_size=inner_size * config.count("n_shared_experts", defaults.num_shared, least=0),
    )


def _windows(config: _Fields, family: _Family, num_layers: int) -> tuple[int | None, ...]:
    """The attention window of each layer."""
    if family.windows == "none":
        return (None,) * num_layers
    if family.windows == "all layers":
        # Absent and null differ here: null is what later versions of these models write for "none".
        default = None if config.has("sliding_window") else family.window
        window = config.get("sliding_window", default)
        return (None if window is None else config.count("sliding_window", default),) * num_layers
    if family.windows != "every second" and not config.get("use_sliding_window", False):
        return (None,) * num_layers
    window = config.count("sliding_window", family.window)
    if family.windows == "all layers if used":
        return (window,) * num_layers
    kinds = config.get("layer_types")
    if kinds is None:
        if family.windows == "every second":
            return tuple(None if layer % 2 else window for layer in range(num_layers))
        first = config.get("max_window_layers", 28)
        if family.windows_alternate:
            return tuple(
                window if layer < first and layer % 2 == 0 else None for layer in range(num_layers)
            )
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if len(kinds) != num_layers or not {"sliding_attention", "full_attention"}.issuperset(kinds):
        config.refuse(
            "layer_types",
            f"is {kinds}, it must say sliding_attention or full_attention for {num_layers} layers",
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _moe(config: _Fields, family: _Family, num_layers: int) -> MoeSpec | None:
    if family.deepseek is not None:
        return _deepseek_moe(config, family.deepseek, num_layers)
    if (defaults := family.experts) is None:
        return None
    num_experts = config.count("num_experts", config.get("num_local_experts", defaults.num_experts))
    num_active = config.count("num_experts_per_tok", defaults.num_active)
    if num_active > num_experts:
        config.refuse("num_experts_per_tok", f"is {num_active}, of {num_experts} experts")
    step = config.count("decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers", [])
    shared_size = defaults.shared_size
    if shared_size:
        shared_size = config.count("shared_expert_intermediate_size", shared_size)
    inner_size = config.count("intermediate_size")
    if defaults.inner_size is not None:
        inner_size = config.count("moe_intermediate_size", defaults.inner_size)
    renormalize = defaults.renormalize
    if renormalize is None:
        renormalize = config.get("norm_topk_prob", defaults.norm_topk)
    return MoeSpec(
        layers=tuple(n not in dense and (n + 1) % step == 0 for n in range(num_layers)),
        num_experts=num_experts,
        num_active=num_active,
        inner_size=inner_size,
        renormalize=bool(renormalize),
        shared_size=shared_size,
        gate_limit=(
            None
            if defaults.gate_limit is None
            else config.number("swiglu_limit", defaults.gate_limit)
        ),
    )


def _rope(
    config: _Fields, family: _Family, max_position: int, original: int
) -> tuple[RopeSpec, int]:
    """The rotary embedding, and the longest position the model is meant for with it.

    `original` is max_position_embeddings as the file has it, before overrides: dynamic scaling
    starts there. Linear and yarn scaling reach `factor` times as far as the model was trained.
    """
    given = config.get("rope_parameters") or config.get("rope_scaling") or family.rope
    if any(isinstance(value, Mapping) for value in given.values()):
        config.refuse("rope_parameters", "different rotary embeddings per layer are not supported")
    rope = _Fields(config.folder, dict(given))
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in _ROPE_KINDS:
        config.refuse("rope type", f"'{kind}' is not supported; there are {', '.join(_ROPE_KINDS)}")
    partial = rope.number(
        "partial_rotary_factor", config.number("partial_rotary_factor", family.rotated or 1.0)
    )
    if family.rotated is None and partial != 1.0:
        config.refuse("partial_rotary_factor", f"is {partial}, only 1.0 is supported")
    if not 0.0 < partial <= 1.0:
        config.refuse("partial_rotary_factor", f"is {partial}, it must be a share of the head")
    usual = family.rope.get("rope_theta", 10000.0)
    theta = rope.number("rope_theta", config.number("rope_theta", usual))
    if kind == "default":
        return RopeSpec(theta=theta, partial_factor=partial), max_position

    if kind in ("llama3", "yarn"):
        original = config.get("original_max_position_embeddings") or rope.count(
            "original_max_position_embeddings", max_position
        )
    factor = rope.number("factor", max_position / original if kind == "yarn" else None)
    spec = RopeSpec(
        kind=kind,
        theta=theta,
        factor=factor,
        original_max_position=original,
        low_freq_factor=rope.number("low_freq_factor", 1.0),
        high_freq_factor=rope.number("high_freq_factor", 4.0),
        beta_fast=rope.number("beta_fast", 0) or 32.0,
        beta_slow=rope.number("beta_slow", 0) or 1.0,
        attention_factor=rope.get("attention_factor"),
        mscale=rope.get("mscale"),
        mscale_all_dim=rope.get("mscale_all_dim"),
        truncate=bool(rope.get("truncate", True)),
        partial_factor=partial,
    )
    if kind == "linear":
        max_position = int(max_position * factor)
    elif kind == "yarn":
        max_position = max(max_position, int(original * factor))
    return spec, max_position


def _dtype(config: _Fields) -> str:
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    dtype = dtype.removeprefix("torch.")
    if dtype not in _DTYPES:
        config.refuse("dtype", f"'{dtype}' is not supported; there are {', '.join(_DTYPES)}")
    return dtype


def _ids(fields: Mapping[str, Any], name: str) -> tuple[int, ...]:
    value = fields.get(name)
    return () if value is None else (value,) if isinstance(value, int) else tuple(value)


def _eos_ids(generation: Mapping[str, Any], config: _Fields, family: _Family) -> tuple[int, ...]:
    """Those of both files: either may forget the end-of-turn token."""
    defaults = {"eos_token_id": family.eos}
    found = _ids(generation, "eos_token_id") + _ids(defaults | config.fields, "eos_token_id")
    return tuple(dict.fromkeys(found))


def _quantization(folder: Path, config: _Fields) -> QuantSpec | None:
    beside = _read_json(folder / "hf_quant_config.json", optional=True).get("quantization")
    return parse_quantization(config.get("quantization_config") or beside or {})
