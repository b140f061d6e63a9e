"""Where a model's default sampling parameters come from, and what is refused."""

import json
from pathlib import Path

import pytest

from penstock.config.schema import EngineConfig
from penstock.errors import ConfigError
from penstock.hub.folder import local_folder
from penstock.hub.generation_config import sampling_defaults

NO_OVERRIDES = EngineConfig().override_generation_config.model_dump()


def write(folder: Path, **values: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "generation_config.json").write_text(json.dumps(values))
    return folder


def test_auto_reads_the_sampling_fields_of_the_models_own_file(tmp_path):
    write(
        tmp_path,
        **{"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": None},
        **{"repetition_penalty": 1.05, "max_new_tokens": 2048, "eos_token_id": [1, 2]},
    )
    found = sampling_defaults("auto", NO_OVERRIDES, "org/model", tmp_path)
    assert found.values == {
        **{"temperature": 0.6, "top_p": 0.9, "top_k": 20},
        **{"repetition_penalty": 1.05, "max_tokens": 2048},
    }
    assert found.reason == "generation_config.json of the model"
    assert str(found).startswith("temperature 0.6, top_p 0.9, top_k 20, ")


@pytest.mark.parametrize("asked", ["vllm", "trtllm"])
def test_neutral_values_leave_the_models_file_alone(tmp_path, asked):
    write(tmp_path, temperature=0.6)
    found = sampling_defaults(asked, NO_OVERRIDES, "org/model", tmp_path)
    assert found.values == {} and str(found) == "neutral" and asked in found.reason


@pytest.mark.parametrize("name", ["other", "other/generation_config.json"])
def test_a_path_is_read_instead_of_the_models_file(tmp_path, name):
    write(tmp_path, temperature=0.6)
    write(tmp_path / "other", top_k=5)
    found = sampling_defaults(str(tmp_path / name), NO_OVERRIDES, "org/model", tmp_path)
    assert found.values == {"top_k": 5}


def test_overrides_win_field_by_field_also_over_neutral_values(tmp_path):
    write(tmp_path, temperature=0.6, top_p=0.9)
    overrides = NO_OVERRIDES | {"temperature": 0.0, "max_new_tokens": 7}
    found = sampling_defaults("auto", overrides, "org/model", tmp_path)
    assert found.values == {"temperature": 0.0, "top_p": 0.9, "max_tokens": 7}
    assert "override_generation_config" in found.reason
    neutral = sampling_defaults("vllm", overrides, "org/model", tmp_path)
    assert neutral.values == {"temperature": 0.0, "max_tokens": 7}


def test_the_default_model_is_careful_and_ends_and_tiny_is_greedy(tmp_path):
    own = sampling_defaults("auto", NO_OVERRIDES, EngineConfig().model, tmp_path / "file.gguf")
    careful = {"temperature": 0.2, "top_p": 0.5, "repetition_penalty": 1.1}
    assert own.values == {**careful, "max_tokens": 512}
    tiny = sampling_defaults("auto", NO_OVERRIDES, "tiny", local_folder("tiny"))
    assert tiny.values == {"temperature": 0.0}


def test_a_model_without_the_file_is_neutral(tmp_path):
    found = sampling_defaults("auto", NO_OVERRIDES, "org/model", tmp_path)
    assert found.values == {} and "no generation_config.json" in found.reason


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"temperature": "0.6"}, 'temperature is "0.6", it must be a number'),
        ({"top_k": 2.5}, "top_k is 2.5, it must be an integer"),
        ({"top_p": True}, "top_p is true, it must be a number"),
        ({"top_p": 1.5}, "top_p is 1.5, it must be between 0.0 and 1.0"),
        ({"max_new_tokens": 0}, "max_tokens is 0, it must be at least 1"),
    ],
)
def test_a_wrong_value_is_refused_with_the_way_out(tmp_path, values, complaint):
    write(tmp_path, **values)
    with pytest.raises(ConfigError, match="set generation_config to vllm") as refusal:
        sampling_defaults("auto", NO_OVERRIDES, "org/model", tmp_path)
    assert complaint in str(refusal.value)


def test_a_folder_without_the_file_and_a_file_that_is_no_json_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="generation_config is auto, vllm or a folder"):
        sampling_defaults(str(tmp_path / "none"), NO_OVERRIDES, "m", tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot read"):
        sampling_defaults("auto", NO_OVERRIDES, "m", tmp_path)
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(ConfigError, match="must hold a JSON object"):
        sampling_defaults("auto", NO_OVERRIDES, "m", tmp_path)


def test_an_unknown_override_is_refused():
    with pytest.raises(ConfigError, match="unknown field 'topp' in override_generation_config"):
        EngineConfig(override_generation_config={"topp": 0.5})
