"""Whatever a YAML file holds, it is settings or a sentence that names the file."""

import os
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.config.load import load_config, parse_set
from penstock.config.schema import EngineConfig
from penstock.config.yaml_file import read_yaml
from penstock.errors import ConfigError

LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 30)
)
HOSTILE = {
    "an alias of itself": ("model_kwargs: &a {a: *a}", "line 1: an alias"),
    "a list in itself": ("a: &a [1, [2, *a]]", "line 1: an alias"),
    "a merge key of itself": ("a: &a\n  <<: *a\n", "an alias"),
    "a billion laughs": (LAUGHS, "more than 100000 values"),
    "deep lists": ("a: " + "[" * 100_000, "nested too deeply"),
    "deep closed lists": ("a: " + "[" * 120 + "]" * 120, "nested more than 50 deep"),
    "deep mappings": ("".join(f"{' ' * n}a:\n" for n in range(600)), "nested"),
    "a number of 5000 digits": (f"max_batch_size: {'1' * 5000}", "cannot be read"),
    "no date": ("model: 2001-99-99", "cannot be read"),
    "an empty number": ("a: !!int ''", "not valid YAML"),
    "a float in words": ("a: !!float many", "not valid YAML"),
    "a time in words": ("a: !!timestamp then", "not valid YAML"),
    "a flag in words": ("a: !!bool perhaps", "not valid YAML"),
    "a mapping as a name": ("? {a: b}\n: c", "not valid YAML"),
    "a list as a name": ("? [a, b]\n: c", "not valid YAML"),
    "a python object": ("a: !!python/object/apply:os.getcwd []", "not valid YAML"),
    "half a character": ('model: "\\ud800"', "surrogate"),
    "a control character": ("a: \x07", "not valid YAML"),
    "two documents": ("a: 1\n---\nb: 2", "not valid YAML"),
    "numbers as names": ("1: 2\n3.5: 4\nnull: 5\ntrue: 6", "not a field name"),
    "a list": ("[1, 2]", "must be a mapping"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_file_is_refused_in_words_and_soon(tmp_path: Path, kind: str) -> None:
    text, wanted = HOSTILE[kind]
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    started = time.process_time()
    with pytest.raises(ConfigError, match=wanted) as refused:
        load_config({"model": "m"}, path)
    assert time.process_time() - started < 60
    assert len(str(refused.value)) < 2000
    if "field name" not in wanted:
        assert str(path) in str(refused.value)


def test_anchors_are_good_for_what_they_are_for(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("x: &x {max_tokens: 64}\nkv_cache_config:\n  <<: *x\n  tokens_per_block: 16\n")
    assert read_yaml(path)["kv_cache_config"] == {"max_tokens": 64, "tokens_per_block": 16}


def test_files_that_never_end_are_refused(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.yaml"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero"), tmp_path):
        with pytest.raises(ConfigError, match="cannot read the configuration file"):
            read_yaml(path)


def test_what_a_shell_puts_in_place_of_a_file_is_read() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"max_batch_size: 3\n")
    os.close(writing)
    assert read_yaml(Path(f"/dev/fd/{reading}")) == {"max_batch_size": 3}
    os.close(reading)


NAMES = [*EngineConfig.model_fields, "kv_cache_config.max_tokens", "cuda_graph_config"]
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(NAMES) | st.text() | st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES) | st.text() | st.integers(), VALUES, max_size=4))
@example({"0": {0: float("nan")}})  # a name that is no text, a value that differs from itself
def test_any_yaml_is_settings_or_words(tmp_path_factory: pytest.TempPathFactory, values) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(yaml.safe_dump(values, allow_unicode=True), encoding="utf-8")
    try:
        load_config({"model": "m"}, path)
    except ConfigError as refused:
        assert str(refused)


@settings(max_examples=300, deadline=None)
@given(st.text())
def test_any_text_after_set_is_a_value_or_words(text: str) -> None:
    for given_text in (text, f"model={text}", f"{text}=1"):
        try:
            load_config({"model": "m"}, sets=[given_text])
        except ConfigError as refused:
            assert str(refused)


def test_a_setting_is_as_bounded_as_a_file() -> None:
    with pytest.raises(ConfigError, match="--set model_kwargs, line 1: an alias"):
        parse_set("model_kwargs=&a [*a]")
