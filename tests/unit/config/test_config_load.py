"""Precedence, merging and errors of flags + YAML + --set."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.load import load_config, merge, parse_set
from penstock.config.yaml_file import read_yaml
from penstock.errors import ConfigError


@pytest.fixture
def yaml_file(tmp_path):
    def write(text: str):
        path = tmp_path / "config.yml"
        path.write_text(text)
        return path

    return write


def test_yaml_wins_over_flags_and_set_wins_over_both(yaml_file):
    flags = {"max_batch_size": 1, "max_num_tokens": 1, "max_seq_len": 10}
    path = yaml_file("max_batch_size: 2\nmax_num_tokens: 2\n")
    config = load_config(flags, path, ["max_batch_size=3"])
    assert (config.max_batch_size, config.max_num_tokens, config.max_seq_len) == (3, 2, 10)


def test_a_flag_that_loses_to_the_file_is_told_with_both_values(yaml_file, caplog):
    path = yaml_file(
        "max_batch_size: 8\nmax_num_tokens: 64\napi_key: from-file\n"
        "kv_cache_config: {free_gpu_memory_fraction: 0.5, max_tokens: 4096}\n"
    )
    flags = {
        **{"max_batch_size": 4, "max_num_tokens": 64, "api_key": "from-flag", "port": 9},
        "kv_cache_config": {"free_gpu_memory_fraction": 0.7},
    }
    config = load_config(flags, path, ["port=10"])
    assert (config.max_batch_size, config.kv_cache_config.free_gpu_memory_fraction) == (8, 0.5)
    lines = [record.getMessage() for record in caplog.records]
    why = "the file wins over flags, as in TensorRT-LLM, and --set over both"
    assert lines == [
        f"max_batch_size is 8, from {path}; the flag's 4 is not used: {why}",
        f"api_key is ***, from {path}; the flag's *** is not used: {why}",
        f"kv_cache_config.free_gpu_memory_fraction is 0.5, from {path}; the flag's 0.7 is not "
        f"used: {why}",
    ]


def test_a_section_in_yaml_keeps_what_the_flags_set_in_it(yaml_file):
    path = yaml_file("kv_cache_config:\n  dtype: fp8\n")
    config = load_config({"kv_cache_config": {"free_gpu_memory_fraction": 0.8}}, path)
    assert config.kv_cache_config.free_gpu_memory_fraction == 0.8


def test_the_short_form_of_a_section_is_a_section_that_others_add_to(yaml_file):
    path = yaml_file("speculative_config: {max_draft_len: 3}\n")
    sets = ["speculative_config.adaptive_draft_len=false"]
    found = load_config({"speculative_config": "draft=small"}, path, sets).speculative_config
    assert (found.decoding_type, found.speculative_model) == ("Draft_Target", "small")
    assert (found.max_draft_len, found.adaptive_draft_len) == (3, False)


def test_an_alias_in_yaml_overrides_the_flag_of_the_field(yaml_file):
    config = load_config({"attn_backend": "sdpa"}, yaml_file("attention_backend: reference"))
    assert config.attn_backend == "reference"


def test_null_in_yaml_turns_graphs_off_and_set_turns_them_on_again(yaml_file):
    path = yaml_file("cuda_graph_config: null")
    assert load_config(path=path).cuda_graph_config is None
    config = load_config(path=path, sets=["cuda_graph_config.max_batch_size=8"])
    assert config.cuda_graph_config.sizes(64) == (1, 2, 4, 8)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("port=1", {"port": 1}),
        ("model=a=b", {"model": "a=b"}),
        ("kv_cache_config.max_tokens = 64", {"kv_cache_config": {"max_tokens": 64}}),
        ("cuda_graph_config.batch_sizes=[1, 2]", {"cuda_graph_config": {"batch_sizes": [1, 2]}}),
        ("cuda_graph_config=null", {"cuda_graph_config": None}),
        ("tp_size=2", {"tensor_parallel_size": 2}),
        ("model_kwargs={num_hidden_layers: 1}", {"model_kwargs": {"num_hidden_layers": 1}}),
        ("model_kwargs.num_hidden_layers=1", {"model_kwargs": {"num_hidden_layers": 1}}),
    ],
)
def test_set_takes_a_dotted_name_and_a_yaml_value(text, expected):
    assert parse_set(text) == expected


@pytest.mark.parametrize("text", ["port", "=1", ".port=1", "a..b=1", "a.=1"])
def test_set_without_a_name_and_a_value_is_refused(text):
    with pytest.raises(ConfigError, match="expected NAME=VALUE"):
        load_config(sets=[text])


def test_the_last_set_of_a_field_counts():
    assert load_config(sets=["port=1", "port=2"]).port == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n- b\n", "holds a list, it must be a mapping"),
        ("just words", "holds a str, it must be a mapping"),
        ("a: [1, 2", "line 1: not valid YAML"),
        ("port: 1\nmodel: x\nport: 2\n", "line 3: not valid YAML: 'port' is given twice"),
        ("kv_cache_config: {dtype: auto, dtype: fp8}", "'dtype' is given twice"),
        ("model: !!python/object/apply:os.system ['true']", "not valid YAML: could not determine"),
        ("a: b: c", "not valid YAML"),
        ("? [1, 2]\n: 3\n", "not valid YAML"),
    ],
)
def test_a_bad_file_is_refused_with_its_place(yaml_file, text, message):
    path = yaml_file(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path=path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read the configuration file .*nowhere\.yml"):
        load_config(path=tmp_path / "nowhere.yml")


def test_a_file_that_is_not_text_is_refused(tmp_path):
    path = tmp_path / "weights.bin"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot read the configuration file"):
        load_config(path=path)


def test_an_empty_file_changes_nothing(yaml_file):
    assert load_config(path=yaml_file("# nothing\n")) == load_config()


def test_yaml_anchors_work(yaml_file):
    values = read_yaml(yaml_file("a: &x {p: 1}\nb: {<<: *x, q: 2}\n"))
    assert values["b"] == {"p": 1, "q": 2}


_TREES = st.recursive(
    st.dictionaries(st.sampled_from("abc"), st.integers(), max_size=3),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner | st.integers(), max_size=3),
    max_leaves=8,
)


@given(under=_TREES, over=_TREES)
def test_merge_keeps_all_of_the_upper_and_what_it_leaves_of_the_lower(under, over):
    result = merge(under, over)
    assert merge(result, over) == result
    assert set(result) == set(under) | set(over)
    for name, value in over.items():
        if not isinstance(value, dict):
            assert result[name] == value
    for name in set(under) - set(over):
        assert result[name] == under[name]
