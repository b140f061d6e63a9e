"""What checkpoints say of their quantisation is understood, or refused with what is supported."""

import pytest

from penstock.errors import ConfigError
from penstock.quant.parse import is_excluded, parse_quantization
from penstock.types.model_spec import Fp8Spec, QuantSpec

FP8 = "float8_e4m3fn"
PER_TENSOR = Fp8Spec(weights="tensor", inputs="static")
PER_ROW = Fp8Spec(weights="channel", inputs="row")


def compressed(weights=None, inputs=None, **fields):
    """compressed-tensors' way of saying it; the defaults are those of an fp8 dynamic checkpoint."""
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "dynamic": False} | (
        weights or {}
    )
    inputs = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True} | (inputs or {})
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    } | fields


STATIC = {"strategy": "tensor", "dynamic": False}
KV_FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
UNDERSTOOD = {
    "nothing": ({}, None),
    "modelopt": (
        {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]},
        QuantSpec(format=PER_TENSOR, excluded=("lm_head",), cache_dtype=FP8),
    ),
    "modelopt in config.json": (
        {
            "quant_method": "modelopt",
            "quant_algo": "FP8",
            "kv_cache_scheme": KV_FP8,
            "ignore": ["lm_head"],
        },
        QuantSpec(format=PER_TENSOR, excluded=("lm_head",), cache_dtype=FP8),
    ),
    "modelopt, cache in another format": (
        {"quant_algo": "FP8", "kv_cache_quant_algo": "NVFP4"},
        QuantSpec(format=PER_TENSOR),
    ),
    "modelopt, cache alone": (
        {"quant_algo": None, "kv_cache_quant_algo": "FP8"},
        QuantSpec(format=None, cache_dtype=FP8),
    ),
    "modelopt, per token": (
        {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
        QuantSpec(format=PER_ROW),
    ),
    "fp8, blocks": (
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
        QuantSpec(format=Fp8Spec(weights="block", inputs="group", scale_name="weight_scale_inv")),
    ),
    "fp8, static": (
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        QuantSpec(format=PER_TENSOR, excluded=("lm_head",)),
    ),
    "fp8, dynamic": (
        {"quant_method": "fp8", "modules_to_not_convert": None},
        QuantSpec(format=Fp8Spec(weights="tensor", inputs="row")),
    ),
    "compressed-tensors, dynamic": (
        compressed(),
        QuantSpec(format=PER_ROW, excluded=("lm_head",)),
    ),
    "compressed-tensors, static": (
        compressed({"strategy": "tensor"}, STATIC, kv_cache_scheme=KV_FP8),
        QuantSpec(format=PER_TENSOR, excluded=("lm_head",), cache_dtype=FP8),
    ),
    "compressed-tensors, static inputs": (
        compressed(inputs=STATIC),
        QuantSpec(format=Fp8Spec(weights="channel", inputs="static"), excluded=("lm_head",)),
    ),
    "compressed-tensors, blocks": (
        compressed(
            {"strategy": "block", "block_structure": [128, 128]},
            {"strategy": "group", "group_size": 128},
        ),
        QuantSpec(format=Fp8Spec(weights="block", inputs="group"), excluded=("lm_head",)),
    ),
}
REFUSED = {
    "NVFP4": {"quant_algo": "NVFP4", "group_size": 16},
    "awq": {"quant_method": "awq", "bits": 4},
    "fmt e5m2": {"quant_method": "fp8", "fmt": "e5m2"},
    "scale_fmt other": {"quant_method": "fp8", "scale_fmt": "other"},
    "weight_block_size [64, 64]": {"quant_method": "fp8", "weight_block_size": [64, 64]},
    "activation_scheme static": {
        "quant_method": "fp8",
        "activation_scheme": "static",
        "weight_block_size": [128, 128],
    },
    "None": {"bits": 8},
    "format pack-quantized": compressed({"num_bits": 4, "type": "int"}, format="pack-quantized"),
    "weights by channel, activations by group": compressed(inputs={"strategy": "group"}),
    "2 groups": compressed(config_groups={"a": {}, "b": {}}),
}


@pytest.mark.parametrize("name", UNDERSTOOD)
def test_every_dialect_of_8_bit_floats_is_understood(name):
    raw, expected = UNDERSTOOD[name]
    assert parse_quantization(raw) == expected


@pytest.mark.parametrize("name", REFUSED)
def test_anything_else_is_refused_by_name_with_what_is_supported(name):
    with pytest.raises(ConfigError) as caught:
        parse_quantization(REFUSED[name])
    assert name in str(caught.value) and "supported are 8-bit floats" in str(caught.value)


@pytest.mark.parametrize(
    ("pattern", "name", "is_left"),
    [
        ("lm_head", "lm_head", True),
        ("lm_head", "model.layers.0.mlp.down_proj", False),
        ("model.layers.0.mlp.gate", "model.layers.0.mlp.gate", True),
        ("model.layers.0.mlp.gate", "model.layers.0.mlp.gate_proj", False),
        ("model.layers.1", "model.layers.1.mlp.down_proj", True),
        ("model.layers.1", "model.layers.11.mlp.down_proj", False),
        ("model.layers.*.self_attn", "model.layers.7.self_attn.o_proj", True),
        ("model.layers.*.self_attn", "model.layers.7.mlp.down_proj", False),
        ("*o_proj*", "model.layers.7.self_attn.o_proj", True),
        ("re:.*down_proj$", "model.layers.7.mlp.down_proj", True),
        ("re:down_proj", "model.layers.7.mlp.down_proj", False),
    ],
)
def test_exclusions_are_words_wildcards_or_regular_expressions(pattern, name, is_left):
    assert is_excluded(QuantSpec(format=PER_TENSOR, excluded=(pattern,)), [name]) == is_left


def test_parts_of_one_matrix_are_all_quantised_or_none_is():
    spec = QuantSpec(format=PER_TENSOR, excluded=("q_proj", "k_proj"))
    assert is_excluded(spec, ["a.q_proj", "a.k_proj"])
    with pytest.raises(ConfigError, match=r"only some of a.q_proj, a.v_proj"):
        is_excluded(spec, ["a.q_proj", "a.v_proj"])


def test_a_broken_expression_is_named():
    with pytest.raises(ConfigError, match=r"excludes 're:\(' from quantisation"):
        parse_quantization(compressed(ignore=["re:("]))
