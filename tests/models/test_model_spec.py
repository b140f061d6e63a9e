"""Real and made-up config.json files are read as transformers reads them."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoConfig, PreTrainedConfig

from penstock.errors import ConfigError
from penstock.models.registry import find_family, supported_architectures
from penstock.models.spec import parse_model_spec
from penstock.types.model_spec import MoeSpec, QuantSpec, W8A8Spec, WeightOnlySpec

REAL = Path(__file__).parents[3] / "shared" / "configs"
BASE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
}


def parse(folder, overrides=None, generation=None, **fields):
    (folder / "config.json").write_text(json.dumps(BASE | fields))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return parse_model_spec(folder, overrides)


def real_configs() -> list[str]:
    return sorted(path.parent.name for path in REAL.glob("*/config.json"))


@pytest.mark.skipif(not REAL.is_dir(), reason="real configs are not here")
@pytest.mark.parametrize("name", real_configs())
def test_real_config_agrees_with_transformers_or_is_refused_by_name(name):
    config = json.loads((REAL / name / "config.json").read_text())
    if config["architectures"][0] not in supported_architectures():
        with pytest.raises(ConfigError, match=config["architectures"][0]):
            parse_model_spec(REAL / name)
        return
    quantization = _beside(name)
    spec, theirs = parse_model_spec(REAL / name), AutoConfig.from_pretrained(REAL / name)
    assert spec.architecture == config["architectures"][0]
    assert spec.vocab_size == theirs.vocab_size
    assert spec.hidden_size == theirs.hidden_size
    assert spec.intermediate_size == theirs.intermediate_size
    assert spec.num_layers == theirs.num_hidden_layers
    assert spec.num_heads == theirs.num_attention_heads
    assert spec.num_kv_heads == theirs.num_key_value_heads
    default_head_size = theirs.hidden_size // theirs.num_attention_heads
    assert spec.head_size == (getattr(theirs, "head_dim", None) or default_head_size)
    assert spec.max_position == theirs.max_position_embeddings
    assert spec.norm_eps == theirs.rms_norm_eps
    assert spec.rope.kind == theirs.rope_parameters["rope_type"]
    assert spec.rope.theta == theirs.rope_parameters["rope_theta"]
    assert spec.rope.factor == theirs.rope_parameters.get("factor", 1.0)
    assert spec.tie_embeddings == theirs.tie_word_embeddings
    assert spec.dtype == str(theirs.dtype or "bfloat16").removeprefix("torch.")
    eos = theirs.eos_token_id
    assert spec.eos_token_ids == tuple(eos if isinstance(eos, list) else [eos])
    kinds = getattr(theirs, "layer_types", None) or ["full_attention"] * spec.num_layers
    assert spec.layer_windows == tuple(
        theirs.sliding_window if kind == "sliding_attention" else None for kind in kinds
    )
    if "NVFP4" in quantization:
        excluded = json.loads((REAL / name / "hf_quant_config.json").read_text())["quantization"]
        assert spec.quantization == QuantSpec(
            format=None,
            weight_only=WeightOnlySpec(layout="nvfp4", bits=4, group=16, inputs="nvfp4"),
            excluded=tuple(excluded["exclude_modules"]),
            cache_dtype="float8_e4m3fn",
        )
    elif quantization:
        fp8 = W8A8Spec(weights="tensor", inputs="static")
        assert spec.quantization == QuantSpec(
            format=fp8, excluded=("lm_head",), cache_dtype="float8_e4m3fn"
        )
    elif spec.architecture == "GptOssForCausalLM":
        excluded = tuple(config["quantization_config"]["modules_to_not_convert"])
        assert spec.quantization == QuantSpec(format="mxfp4", excluded=excluded)
    elif "quantization_config" in config:  # those of the other models that are served have blocks
        fp8 = W8A8Spec(weights="block", inputs="group", scale_name="weight_scale_inv")
        assert spec.quantization is not None and spec.quantization.format == fp8
    else:
        assert spec.quantization is None
    if "Moe" in spec.architecture or "Next" in spec.architecture:
        _check_experts(spec.moe, theirs)
    elif not spec.architecture.startswith(("Deepseek", "GptOss")):
        assert spec.moe is None


def _check_experts(moe: MoeSpec | None, theirs: PreTrainedConfig) -> None:
    assert moe is not None
    assert moe.num_experts == theirs.num_experts
    assert moe.num_active == theirs.num_experts_per_tok
    assert moe.intermediate_size == theirs.moe_intermediate_size
    assert moe.renormalize == theirs.norm_topk_prob
    assert moe.shared_intermediate_size == getattr(theirs, "shared_expert_intermediate_size", 0)
    assert moe.layers == (True,) * theirs.num_hidden_layers


@pytest.mark.skipif(not REAL.is_dir(), reason="real configs are not here")
def test_recurrent_layers_are_those_of_transformers(tmp_path):
    folder = REAL / "Qwen3-Next-80B-A3B-Thinking"
    spec, theirs = parse_model_spec(folder), AutoConfig.from_pretrained(folder)
    delta = spec.delta
    assert delta.layers == tuple(kind == "linear_attention" for kind in theirs.layer_types)
    assert sum(delta.layers) == 36 and spec.zero_centered_norms
    assert delta.num_key_heads == theirs.linear_num_key_heads
    assert delta.num_value_heads == theirs.linear_num_value_heads
    assert delta.key_size == theirs.linear_key_head_dim
    assert delta.value_size == theirs.linear_value_head_dim
    assert delta.conv_width == theirs.linear_conv_kernel_dim
    assert spec.rope.partial_factor == theirs.rope_parameters["partial_rotary_factor"] == 0.25
    defaults = {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"}
    spec = parse(tmp_path, **defaults)
    theirs = AutoConfig.for_model("qwen3_next", num_hidden_layers=4)
    assert spec.delta == replace(delta, layers=(True, True, True, False))
    assert spec.rope.partial_factor == 0.25
    _check_experts(spec.moe, theirs)
    assert parse(tmp_path, **defaults, full_attention_interval=2).delta.layers == (True, False) * 2
    kinds = ["full_attention", "linear_attention"] * 2
    assert parse(tmp_path, **defaults, layer_types=kinds).delta.layers == (False, True) * 2
    for wrong in (kinds[:3], ["linear_attention"] * 4, ["sliding_attention", *kinds[1:]]):
        with pytest.raises(ConfigError, match="layer_types"):
            parse(tmp_path, **defaults, layer_types=wrong)
    with pytest.raises(ConfigError, match="30 is no multiple of 16 key heads"):
        parse(tmp_path, **defaults, linear_num_value_heads=30)


def test_layers_with_experts_are_those_of_transformers(tmp_path):
    for arch, kind in (("Qwen2Moe", "qwen2_moe"), ("Qwen3Moe", "qwen3_moe")):
        names = {"architectures": [f"{arch}ForCausalLM"], "model_type": kind}
        fields = names | {"num_key_value_heads": 4, "num_experts": 8}
        moe = parse(tmp_path, **fields, decoder_sparse_step=2, mlp_only_layers=[3]).moe
        assert moe.layers == (False, True, False, False)
        assert parse(tmp_path, **fields).moe.layers == (True,) * 4
        with pytest.raises(ConfigError, match="num_experts_per_tok: is 9, of 8 experts"):
            parse(tmp_path, **fields, num_experts_per_tok=9)
    qwen2 = parse(tmp_path, architectures=["Qwen2MoeForCausalLM"], num_key_value_heads=4)
    theirs = AutoConfig.for_model("qwen2_moe", num_hidden_layers=4)
    _check_experts(qwen2.moe, theirs)
    assert qwen2.attention_bias and not qwen2.attention_out_bias


def _beside(name: str) -> str:
    path = REAL / name / "hf_quant_config.json"
    return path.read_text() if path.is_file() else ""


def test_fields_left_out_have_the_defaults_of_their_model_type(tmp_path):
    llama = parse(tmp_path)
    assert (llama.num_kv_heads, llama.head_size, llama.max_position) == (8, 8, 2048)
    assert (llama.bos_token_id, llama.eos_token_ids) == (1, (2,))
    assert not llama.attention_bias and not llama.tie_embeddings
    fields = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    mistral = parse(tmp_path, **fields)
    assert mistral.layer_windows == (4096,) * 4
    assert parse(tmp_path, **fields, sliding_window=None).layer_windows == (None,) * 4
    qwen2 = parse(
        tmp_path, architectures=["Qwen2ForCausalLM"], model_type="qwen2", num_key_value_heads=4
    )
    assert qwen2.attention_bias and not qwen2.attention_out_bias
    assert (qwen2.max_position, qwen2.eos_token_ids) == (32768, ())
    qwen3 = parse(
        tmp_path, architectures=["Qwen3ForCausalLM"], model_type="qwen3", num_key_value_heads=4
    )
    assert qwen3.qk_norm and qwen3.head_size == 128 and not qwen3.attention_bias


def test_architecture_follows_from_the_model_type_where_none_is_named(tmp_path):
    assert parse(tmp_path, architectures=None).architecture == "LlamaForCausalLM"


def test_both_generations_of_rope_fields_mean_the_same(tmp_path):
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    }
    four = parse(tmp_path, rope_theta=5e5, rope_scaling=scaling | {"rope_type": "llama3"})
    five = parse(tmp_path, rope_parameters=scaling | {"rope_type": "llama3", "rope_theta": 500000})
    oldest = parse(tmp_path, rope_theta=5e5, rope_scaling=scaling | {"type": "llama3"})
    assert four == five == oldest
    assert (four.rope.kind, four.rope.theta, four.rope.original_max_position) == (
        "llama3",
        5e5,
        256,
    )


def test_scaled_rope_says_how_far_it_reaches(tmp_path):
    def reach(**scaling):
        return parse(tmp_path, max_position_embeddings=1000, rope_scaling=scaling).max_position

    assert reach(type="linear", factor=4.0) == 4000
    assert reach(type="yarn", factor=4.0, original_max_position_embeddings=1000) == 4000
    assert reach(type="yarn", factor=4.0, original_max_position_embeddings=250) == 1000
    assert reach(type="yarn", factor=4.0) == 4000
    assert reach(type="llama3", factor=8.0, original_max_position_embeddings=125) == 1000
    assert reach(type="dynamic", factor=4.0) == 1000


@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [
        ("qwen2", "Qwen2ForCausalLM"),
        ("qwen2_moe", "Qwen2MoeForCausalLM"),
        ("qwen3", "Qwen3ForCausalLM"),
        ("gpt_oss", "GptOssForCausalLM"),
    ],
)
@pytest.mark.parametrize("first", [0, 3, 4])
def test_windows_of_a_config_that_names_no_layers_are_those_of_transformers(
    model_type, architecture, first, tmp_path
):
    fields = BASE | {
        "num_key_value_heads": 4, "sliding_window": 16, "use_sliding_window": True,
        "max_window_layers": first, "model_type": model_type,
    }  # fmt: skip
    theirs = AutoConfig.for_model(**fields)
    expected = [16 if kind == "sliding_attention" else None for kind in theirs.layer_types]
    assert len(expected) == 4
    spec = parse(tmp_path, **fields | {"architectures": [architecture]})
    assert spec.layer_windows == tuple(expected)


def test_windows_follow_the_layers(tmp_path):
    qwen = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "num_key_value_heads": 4,
        "sliding_window": 16,
    }
    assert parse(tmp_path, **qwen).layer_windows == (None,) * 4
    on = qwen | {"use_sliding_window": True, "max_window_layers": 3}
    assert parse(tmp_path, **on).layer_windows == (None, None, None, 16)
    kinds = ["sliding_attention", "full_attention"] * 2
    assert parse(tmp_path, **on, layer_types=kinds).layer_windows == (16, None, 16, None)
    with pytest.raises(ConfigError, match="layer_types"):
        parse(tmp_path, **on, layer_types=["linear_attention"] * 4)
    with pytest.raises(ConfigError, match="layer_types"):
        parse(tmp_path, **on, layer_types=kinds[:3])


def test_end_tokens_of_both_files_count(tmp_path):
    spec = parse(tmp_path, eos_token_id=5, generation={"eos_token_id": [7, 5]})
    assert spec.eos_token_ids == (7, 5)
    assert parse(tmp_path, eos_token_id=[3, 4], generation={}).eos_token_ids == (3, 4)
    assert parse(tmp_path, eos_token_id=None).eos_token_ids == ()


def test_overrides_reach_into_nested_fields(tmp_path):
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0}
    spec = parse(
        tmp_path, {"rope_parameters": {"factor": 3.0}, "num_hidden_layers": 1}, rope_parameters=rope
    )
    assert (spec.rope.factor, spec.rope.theta, spec.num_layers) == (3.0, 100.0, 1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": None}, "hidden_size: is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: is 0"),
        ({"vocab_size": "many"}, "vocab_size: is 'many'"),
        ({"num_key_value_heads": 3}, "3 does not divide 8"),
        ({"hidden_act": "gelu"}, "'gelu' is not supported"),
        ({"rope_scaling": {"type": "other", "factor": 2.0}}, "'other' is not supported"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "short_factor: has 0 numbers"),
        ({"rope_scaling": {"type": "linear"}}, "factor: is missing"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "per layer"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"torch_dtype": "float8_e4m3fn"}, "dtype: 'float8_e4m3fn'"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(tmp_path, fields, message):
    with pytest.raises(ConfigError, match=message):
        parse(tmp_path, **fields)


def test_unknown_architecture_lists_the_supported_ones(tmp_path):
    with pytest.raises(ConfigError) as caught:
        parse(tmp_path, architectures=["GPT2LMHeadModel"])
    for name in ("GPT2LMHeadModel", *supported_architectures()):
        assert name in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "nan and void"])
def test_unreadable_config_is_a_config_error(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        parse_model_spec(tmp_path)
    with pytest.raises(ConfigError, match="cannot read"):
        parse_model_spec(tmp_path / "nothing")


def test_an_override_of_the_quantization_wins_over_the_file_beside(tmp_path):
    (tmp_path / "hf_quant_config.json").write_text(
        '{"quantization": {"quant_algo": "W4A8_MXFP4_FP8"}}'
    )
    with pytest.raises(ConfigError, match=r"quantized \(W4A8_MXFP4_FP8\).*supported are FP8"):
        parse(tmp_path)
    spec = parse(tmp_path, {"quantization_config": {"quant_algo": "FP8"}})
    assert spec.quantization.format == W8A8Spec(weights="tensor", inputs="static")


@pytest.mark.parametrize(
    ("model_type", "has_bias"), [("qwen2", True), ("mixtral", False), ("qwen2_moe", None)]
)
def test_a_qkv_bias_that_the_architecture_fixes_is_not_read(tmp_path, model_type, has_bias):
    for asked in (True, False):
        spec = parse(
            tmp_path,
            architectures=None,
            model_type=model_type,
            num_key_value_heads=8,
            qkv_bias=asked,
        )
        assert spec.attention_bias == (asked if has_bias is None else has_bias)


def test_every_architecture_has_a_family_that_names_it():
    for architecture in supported_architectures():
        family = find_family([architecture], "")
        assert family is not None and family.architecture == architecture
    assert find_family(["Qwen3ForCausalLM"], "llama") is find_family([], "qwen3")
    assert find_family(["NoSuchModel"], "llama") is None and find_family([], "") is None


def test_parsing_needs_no_torch():
    code = (
        "import sys, penstock.models.spec, penstock.hub.folder\n"
        "from penstock.models.registry import find_family, supported_architectures\n"
        "assert all(find_family([name], '') for name in supported_architectures())\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
