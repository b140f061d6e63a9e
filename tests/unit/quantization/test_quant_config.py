"""What checkpoints say of their quantization is understood, or refused with what is supported."""

import pytest

from penstock.errors import ConfigError
from penstock.quantization.quant_config import is_excluded, parse_quantization
from penstock.types.model_spec import QuantSpec, W8A8Spec, WeightOnlySpec

FP8 = "float8_e4m3fn"
PER_TENSOR = W8A8Spec(weights="tensor", inputs="static")
PER_ROW = W8A8Spec(weights="channel", inputs="row")


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


NVFP4 = WeightOnlySpec(layout="nvfp4", bits=4, group=16, inputs="nvfp4")
NVFP4_ALONE = WeightOnlySpec(layout="nvfp4", bits=4, group=16)
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
INT8 = {"num_bits": 8, "type": "int"}
FP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}


def weights_alone(weights, **fields):
    """compressed-tensors' way of saying that inputs stay as they are."""
    raw = compressed(weights, **fields)
    raw["config_groups"]["group_0"]["input_activations"] = None
    return raw


def weight_only(layout, bits, group, *excluded, **fields):
    spec = WeightOnlySpec(layout=layout, bits=bits, group=group, **fields)
    return QuantSpec(format=None, weight_only=spec, excluded=excluded)


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
        QuantSpec(format=PER_TENSOR, cache_dtype="float4_e2m1fn_x2"),
    ),
    "modelopt, cache in integers": (
        {"quant_algo": "FP8", "kv_cache_quant_algo": "INT8"},
        QuantSpec(format=PER_TENSOR, cache_dtype="INT8"),
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
        QuantSpec(format=W8A8Spec(weights="block", inputs="group", scale_name="weight_scale_inv")),
    ),
    "fp8, static": (
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        QuantSpec(format=PER_TENSOR, excluded=("lm_head",)),
    ),
    "fp8, dynamic": (
        {"quant_method": "fp8", "modules_to_not_convert": None},
        QuantSpec(format=W8A8Spec(weights="tensor", inputs="row")),
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
        QuantSpec(format=W8A8Spec(weights="channel", inputs="static"), excluded=("lm_head",)),
    ),
    "compressed-tensors, blocks": (
        compressed(
            {"strategy": "block", "block_structure": [128, 128]},
            {"strategy": "group", "group_size": 128},
        ),
        QuantSpec(format=W8A8Spec(weights="block", inputs="group"), excluded=("lm_head",)),
    ),
    "compressed-tensors, int8": (
        compressed(INT8, INT8),
        QuantSpec(
            format=W8A8Spec(weights="channel", inputs="row", numbers="int8"),
            excluded=("lm_head",),
        ),
    ),
    "compressed-tensors, int8, static": (
        compressed(INT8, INT8 | STATIC),
        QuantSpec(
            format=W8A8Spec(weights="channel", inputs="static", numbers="int8"),
            excluded=("lm_head",),
        ),
    ),
    "compressed-tensors, 4 bits": (
        weights_alone(INT4, format="pack-quantized"),
        weight_only("packed", 4, 128, "lm_head"),
    ),
    "compressed-tensors, 4 bits with zero points": (
        weights_alone(INT4 | {"symmetric": False}),
        weight_only("packed", 4, 128, "lm_head", has_zeros=True),
    ),
    "compressed-tensors, 8 bits of weights alone": (
        weights_alone(INT8 | {"strategy": "channel"}),
        weight_only("packed", 8, 0, "lm_head"),
    ),
    "compressed-tensors, 8-bit floats of weights alone": (
        weights_alone({}),
        weight_only("fp8", 8, 0, "lm_head"),
    ),
    "compressed-tensors, 8-bit floats in blocks, of weights alone": (
        weights_alone({"strategy": "block", "block_structure": [128, 128]}),
        weight_only("fp8", 8, 128, "lm_head"),
    ),
    "compressed-tensors, NVFP4": (
        compressed(FP4, FP4 | {"dynamic": "local"}, format="nvfp4-pack-quantized"),
        QuantSpec(format=None, weight_only=NVFP4, excluded=("lm_head",)),
    ),
    "compressed-tensors, NVFP4 of weights alone": (
        weights_alone(FP4),
        QuantSpec(format=None, weight_only=NVFP4_ALONE, excluded=("lm_head",)),
    ),
    "compressed-tensors, MXFP4 with MXFP8": (
        compressed(
            FP4 | {"strategy": "group", "group_size": 32},
            {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32},
        ),
        QuantSpec(
            format=None,
            weight_only=WeightOnlySpec(layout="mxfp4", bits=4, group=32, inputs="mxfp8"),
            excluded=("lm_head",),
        ),
    ),
    "modelopt, INT4 with FP8": (
        {"quant_algo": "W4A8_AWQ", "group_size": 256},
        QuantSpec(
            format=None,
            weight_only=WeightOnlySpec(layout="modelopt", bits=4, group=256, inputs="fp8"),
            has_input_scales=True,
        ),
    ),
    "modelopt, INT4 with FP8 in groups that no kernel takes": (
        {"quant_algo": "W4A8_AWQ", "group_size": 64},
        QuantSpec(
            format=None,
            weight_only=WeightOnlySpec(layout="modelopt", bits=4, group=64),
            has_input_scales=True,
        ),
    ),
    "modelopt, NVFP4 with FP8": (
        {"quant_algo": "W4A8_NVFP4_FP8", "group_size": 16},
        QuantSpec(format=None, weight_only=NVFP4_ALONE),
    ),
    "compressed-tensors, MXFP4": (
        weights_alone(FP4 | {"strategy": "group", "group_size": 32}),
        weight_only("mxfp4", 4, 32, "lm_head"),
    ),
    "modelopt, NVFP4": (
        {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": "FP8",
            "group_size": 16,
            "exclude_modules": ["lm_head"],
        },
        QuantSpec(format=None, weight_only=NVFP4, excluded=("lm_head",), cache_dtype=FP8),
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"},
        weight_only("awq", 4, 128, has_zeros=True),
    ),
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True, "sym": True},
        weight_only("gptq", 4, 128, zero_offset=1),
    ),
    "gptq, second version": (
        {
            "quant_method": "gptq",
            "bits": 8,
            "group_size": -1,
            "sym": False,
            "checkpoint_format": "gptq_v2",
            "dynamic": {r"-:.*down_proj": {}},
        },
        weight_only("gptq", 8, 0, "re:.*down_proj", has_zeros=True),
    ),
    "auto-round": (
        {
            "quant_method": "auto-round",
            "packing_format": "auto_round:auto_gptq",
            "bits": 4,
            "group_size": 64,
            "sym": True,
            "extra_config": {"lm_head": {"bits": 16}},
        },
        weight_only("gptq", 4, 64, "lm_head", zero_offset=1),
    ),
    "bitsandbytes, 4 bits": (
        {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "llm_int8_skip_modules": ["lm_head"],
        },
        weight_only("bitsandbytes", 4, 64, "lm_head"),
    ),
    "bitsandbytes, 8 bits": (
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        weight_only("bitsandbytes", 8, 0),
    ),
}
REFUSED = {
    "NVFP4, group_size 32": {"quant_algo": "NVFP4", "group_size": 32},
    "W4A8_MXFP4_FP8": {"quant_algo": "W4A8_MXFP4_FP8"},
    "W4A16_AWQ, has_zero_point True": {"quant_algo": "W4A16_AWQ", "has_zero_point": True},
    "FP8_PB_WO, group_size 64": {"quant_algo": "FP8_PB_WO", "group_size": 64},
    "MIXED_PRECISION without quantized_layers": {"quant_algo": "MIXED_PRECISION"},
    "W8A16": {
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "W8A16"}},
    },
    "awq, 4 bits, version gemv": {"quant_method": "awq", "bits": 4, "version": "GEMV"},
    "gptq, 3 bits": {"quant_method": "gptq", "bits": 3},
    "gptq, dynamic, +:.*q_proj": {
        "quant_method": "gptq",
        "bits": 4,
        "dynamic": {"+:.*q_proj": {"bits": 8}},
    },
    "auto-round, packing_format auto_round:llm_compressor": {
        "quant_method": "auto-round",
        "packing_format": "auto_round:llm_compressor",
    },
    "bitsandbytes, fp4": {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "fp4",
    },
    "INT3 by ": weights_alone(INT4 | {"num_bits": 3}),
    "FP4 by tensor_group of 32": compressed(FP4 | {"group_size": 32}),
    "weight-only FP8 by group": weights_alone({"strategy": "group", "group_size": 64}),
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
def test_every_dialect_is_understood(name):
    raw, expected = UNDERSTOOD[name]
    assert parse_quantization(raw) == expected


@pytest.mark.parametrize("name", REFUSED)
def test_anything_else_is_refused_by_name_with_what_is_supported(name):
    with pytest.raises(ConfigError) as caught:
        parse_quantization(REFUSED[name])
    assert name in str(caught.value) and "supported are FP8 (E4M3)" in str(caught.value)


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


def test_parts_of_one_matrix_are_all_quantized_or_none_is():
    spec = QuantSpec(format=PER_TENSOR, excluded=("q_proj", "k_proj"))
    assert is_excluded(spec, ["a.q_proj", "a.k_proj"])
    with pytest.raises(ConfigError, match=r"only some of a.q_proj, a.v_proj"):
        is_excluded(spec, ["a.q_proj", "a.v_proj"])


def test_a_broken_expression_is_named():
    with pytest.raises(ConfigError, match=r"excludes 're:\(' from quantization"):
        parse_quantization(compressed(ignore=["re:("]))


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [
        (KV_FP8, FP8),
        ({"num_bits": 8, "type": "float"}, FP8),
        ("static", FP8),
        (None, None),
        (KV_FP8 | {"type": "int"}, "INT8"),
        (KV_FP8 | {"num_bits": 4, "strategy": "tensor_group"}, "FP4 by tensor_group"),
        (KV_FP8 | {"strategy": "attn_head"}, "FP8 by attn_head"),
        (KV_FP8 | {"dynamic": True}, "dynamic FP8"),
        (KV_FP8 | {"type": "int", "symmetric": False}, "asymmetric INT8"),
        ("dynamic", "'dynamic'"),
        ({"num_bits": "x" * 100}, "INT" + "x" * 40),
    ],
)
def test_the_cache_that_a_checkpoint_is_made_for_has_a_name(scheme, expected):
    spec = parse_quantization(compressed(kv_cache_scheme=scheme))
    assert spec is not None and spec.cache_dtype == expected
