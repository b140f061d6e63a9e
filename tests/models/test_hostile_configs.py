"""Whatever a checkpoint's JSON files hold, they describe a model or are refused in words.

Every field of every real configuration, at every depth, is replaced by values of other kinds.
"""

import copy
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config.resolve import resolve
from penstock.config.schema import EngineConfig
from penstock.errors import ConfigError
from penstock.hub.folder import local_folder
from penstock.kernels.device import probe
from penstock.layers.rope import cos_sin_table, score_factor
from penstock.models.spec import parse_model_spec

REAL = Path(__file__).parents[3] / "shared" / "configs"
SIBLINGS = Path(__file__).parents[1] / "siblings"
DEEP: Any = []
for _ in range(500):
    DEEP = [DEEP]
WRONG = [
    None, True, False, 0, 1, -1, 2, 7, 1.5, -0.5, 10**9, 10**40, float("nan"), float("inf"), "",
    "text", "5", "\ud800", [], [None], [5, "a", {}], [[]], {}, {"a": 1}, {"type": []}, DEEP,
]  # fmt: skip
QUANTIZED = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"-:a": {}}},
    "auto-round": {
        "quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4,
        "extra_config": {"model.layers.0": {"bits": 16}},
    },
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_8bit": True,
                     "llm_int8_skip_modules": ["lm_head"]},
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128},
        }},
        "ignore": ["lm_head"], "kv_cache_scheme": {"num_bits": 8, "type": "float"},
    },
    "modelopt mixed": {
        "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": "INT8",
        "quantized_layers": {"a": {"quant_algo": "W4A16_AWQ", "group_size": 128}},
    },
    "modelopt awq": {
        "quant_method": "modelopt", "quant_algo": "W4A8_AWQ", "has_zero_point": False,
        "config_groups": {"group_0": {"weights": {"group_size": 64}}},
    },
    "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": ["a"]},
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"},
}  # fmt: skip
FIELDS = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-6,
}  # fmt: skip
FAMILIES = {  # of which there is no real configuration here
    "gemma3": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": FIELDS | {
            "sliding_window": 16, "sliding_window_pattern": 2, "rope_local_base_freq": 1e4,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_theta": 1e6,
            "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 8,
        },
    },
    "gemma3_text": {
        "architectures": ["Gemma3ForCausalLM"],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "glm4_moe": {
        "architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 8, "n_group": 2,
        "topk_group": 1, "num_experts_per_tok": 2, "use_qk_norm": True,
        "num_nextn_predict_layers": 1, "n_shared_experts": 1,
    },
    "llama4": {
        "architectures": ["Llama4ForCausalLM"], "attention_chunk_size": 16, "moe_layers": [1],
        "no_rope_layers": [1, 0], "floor_scale": 16, "attn_scale": 0.1, "num_local_experts": 4,
        "layer_types": ["chunked_attention", "full_attention"], "intermediate_size_mlp": 64,
    },
    "phi3": {
        "architectures": ["Phi3ForCausalLM"], "original_max_position_embeddings": 64,
        "max_position_embeddings": 128, "sliding_window": 16,
        "rope_scaling": {"type": "su", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
    },
}  # fmt: skip
SCALED = {
    "rope_parameters": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024,
        "rope_theta": 1e6, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
        "attention_factor": 1.0, "truncate": True, "partial_rotary_factor": 1.0,
    },
    "original_max_position_embeddings": 1024, "pad_token_id": 3, "bos_token_id": 1,
    "eos_token_id": [2, 3], "qkv_bias": False, "attention_bias": False, "head_dim": 8,
}  # fmt: skip


def files() -> dict[str, dict[str, dict[str, Any]]]:
    """Name of a checkpoint -> its JSON files."""
    folders = [*REAL.glob("*/"), *SIBLINGS.glob("*/"), local_folder("tiny")]
    found = {
        folder.name: {
            file.name: json.loads(file.read_text())
            for file in folder.glob("*config.json")
            if file.name != "tokenizer_config.json"
        }
        for folder in folders
        if (folder / "config.json").is_file()
    }
    tiny = found["tiny"]
    for name, fields in QUANTIZED.items():
        found[name] = tiny | {"config.json": tiny["config.json"] | {"quantization_config": fields}}
    for name, fields in FAMILIES.items():
        found[name] = {"config.json": FIELDS | fields}
    for kind in ("yarn", "llama3", "linear", "dynamic"):
        scaled = copy.deepcopy(SCALED)
        scaled["rope_parameters"]["rope_type"] = kind
        found[f"tiny, {kind}"] = tiny | {"config.json": tiny["config.json"] | scaled}
    return found


FILES = files()


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from places(inner, (*path, key))
    elif isinstance(value, list) and value:
        yield from places(value[0], (*path, 0))


def replaced(value: Any, path: tuple[Any, ...], by: Any) -> Any:
    value = copy.deepcopy(value)
    inner = value
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = by
    return value


def read(folder: Path, contents: dict[str, Any]) -> None:
    """As a start does, up to the first tensor."""
    for name, value in contents.items():
        (folder / name).write_text(json.dumps(value))
    try:
        spec = parse_model_spec(folder)
        asked = EngineConfig(model=str(folder), device="cpu", max_seq_len=64)
        resolve(asked, spec, probe(), str(folder))
        if spec.head_size <= 1 << 16:
            cos_sin_table(spec.rope, spec.head_size, spec.max_position, 16)
            score_factor(spec.rope)
    except ConfigError as refused:
        assert 20 < len(str(refused)) < 3000


@pytest.mark.parametrize("name", FILES)
def test_any_field_of_another_kind_is_read_or_refused_in_words(tmp_path: Path, name: str) -> None:
    """Half of the wrong values for a field, the other half in another file, which has it, too."""
    begin = sorted(FILES).index(name)
    for file, fields in FILES[name].items():
        for number, path in enumerate(places(fields), begin):
            for wrong in WRONG[number % 2 :: 2]:
                read(tmp_path, FILES[name] | {file: replaced(fields, path, wrong)})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(sorted(FILES)), st.data())
def test_several_wrong_fields_at_once_are_refused_in_words(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
) -> None:
    contents = FILES[name]
    for _ in range(data.draw(st.integers(1, 3))):
        file = data.draw(st.sampled_from(sorted(contents)))
        if not (known := list(places(contents[file]))):
            continue
        path = data.draw(st.sampled_from(known))
        contents = contents | {file: replaced(contents[file], path, data.draw(JSON))}
    folder = tmp_path_factory.mktemp("model")
    read(folder, contents)


BROKEN = {
    "deep": ('{"a": ' * 100_000, "nested too deeply"),
    "a number of 5000 digits": ('{"vocab_size": ' + "1" * 5000 + "}", "is not JSON"),
    "no object": ("[1]", "no JSON object"),
    "no text": (b"\xff\xfe{}", "not UTF-8"),
    "nothing": ("", "is not JSON"),
}


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "hf_quant_config.json"])
@pytest.mark.parametrize("kind", [*BROKEN, "pipe", "folder", "socket"])
def test_a_broken_file_is_named(tmp_path: Path, file: str, kind: str) -> None:
    for name, value in FILES["tiny"].items():
        (tmp_path / name).write_text(json.dumps(value))
    path = tmp_path / file
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
        wanted = "a pipe"
    elif kind == "folder":
        path.mkdir()
        wanted = "a folder"
    elif kind == "socket":
        os.mknod(path, 0o140600)
        wanted = "a socket"
    else:
        content, wanted = BROKEN[kind]
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=wanted) as refused:
        parse_model_spec(tmp_path)
    assert str(path) in str(refused.value)


def test_an_end_token_in_words_is_named(tmp_path: Path) -> None:
    for file in ("config.json", "generation_config.json"):
        for wrong in ("</s>", ["</s>"], 10**12, -1, [[2]], 2.0, True):
            contents = FILES["tiny"] | {file: FILES["tiny"][file] | {"eos_token_id": wrong}}
            for name, value in contents.items():
                (tmp_path / name).write_text(json.dumps(value))
            with pytest.raises(ConfigError, match=f"{file} of .*eos_token_id: is .*ids of tokens"):
                parse_model_spec(tmp_path)


def test_an_end_token_that_the_vocabulary_lacks_is_none(tmp_path: Path) -> None:
    config = FILES["tiny"]["config.json"] | {"eos_token_id": [3, 10**6]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert parse_model_spec(tmp_path).eos_token_ids == (3,)
