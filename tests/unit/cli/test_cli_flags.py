"""The flag table: in step with the schema, complete against trtllm-serve, forgiving in spelling."""

import argparse
import re
from pathlib import Path
from types import NoneType
from typing import Literal, get_args, get_origin

import pytest
from pydantic import BaseModel

from penstock.cli.flags import FLAGS, add_serve_flags, normalize, settings
from penstock.config.schema import EngineConfig
from penstock.config.trtllm_fields import FIELDS, Verdict
from penstock.errors import ConfigError

FACTS = Path(__file__).parents[4] / "shared" / "design" / "trtllm_facts.md"
KINDS = {int: "int", float: "float", str: "text", bool: "switch"}


def parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    add_serve_flags(parser)
    return parser.parse_args(normalize(argv))


def field_info(path: str):
    model: type[BaseModel] = EngineConfig
    *sections, name = path.split(".")
    for section in sections:
        annotation = model.model_fields[section].annotation
        model = next(
            arm
            for arm in (annotation, *get_args(annotation))
            if isinstance(arm, type) and issubclass(arm, BaseModel)
        )
    return model.model_fields.get(name)


def kind_of(annotation) -> str | None:
    if get_origin(annotation) is dict:
        return "texts"  # NAME=VALUE, several
    arms = [arm for arm in get_args(annotation) or (annotation,) if arm is not NoneType]
    if get_origin(annotation) is Literal or any(get_origin(arm) is Literal for arm in arms):
        return "text"
    return KINDS.get(arms[0])


def test_every_flag_sets_a_schema_field_of_its_kind_or_has_a_ruling():
    for flag in FLAGS:
        info = None if flag.ruling else field_info(flag.field)
        if info is not None:
            section = FIELDS.get(flag.field)
            has_short_form = section is not None and section.kind is not None
            kind = "text" if has_short_form else kind_of(info.annotation)
            assert kind == flag.kind, flag.field
            assert flag.help, f"--{flag.field} has no help"
        elif flag.ruling is None:
            assert FIELDS[flag.field].verdict is not Verdict.SUPPORTED, flag.field
        else:
            assert flag.ruling.verdict is not Verdict.SUPPORTED, flag.field


def test_every_simple_field_of_the_root_has_a_flag():
    with_flag = {flag.field for flag in FLAGS} | {"model"}
    simple = {name for name, info in EngineConfig.model_fields.items() if kind_of(info.annotation)}
    assert simple - with_flag == set()


@pytest.mark.skipif(not FACTS.exists(), reason="the fact sheet is not here")
def test_every_flag_of_trtllm_serve_is_taken():
    text = FACTS.read_text(encoding="utf-8")
    chapter = text[text.index("### 1.1") : text.index("### 1.2")]
    table = [line.split("|")[1] for line in chapter.splitlines() if line.startswith("| `--")]
    newer = chapter[chapter.index("Newer main") : chapter.index("v1.0.0rc6")]
    names = set(re.findall(r"--([a-z_-]+[a-z])", "\n".join([*table, newer])))
    assert len(names) > 50
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_serve_flags(parser)
    known = {option.removeprefix("--") for option in parser._option_string_actions}
    assert {name.replace("-", "_") for name in names} - known == set()


@pytest.mark.parametrize(
    ("short", "kind", "model"),
    [
        ("mtp", "MTP", None),
        ("auto", "AUTO", None),
        ("draft=org/small", "Draft_Target", "org/small"),
        ("eagle3=heads/a=b", "Eagle3", "heads/a=b"),
    ],
)
def test_speculate_is_the_short_form_of_a_section(short, kind, model):
    values, _ = settings(parse("m", "--speculate", short))
    config = EngineConfig(**values).speculative_config
    assert (config.decoding_type, config.speculative_model) == (kind, model)


def test_both_spellings_and_the_equals_sign_are_understood():
    for argv in (["--max-batch-size", "4"], ["--max_batch_size=4"], ["--max-batch_size=4"]):
        values, _ = settings(parse("m", *argv))
        assert values == {"model": "m", "max_batch_size": 4}


def test_values_keep_their_dashes():
    values, _ = settings(parse("org/a-model", "--host=my-host", "--tokenizer", "a-b"))
    assert values == {"model": "org/a-model", "host": "my-host", "tokenizer": "a-b"}


def test_the_last_of_a_repeated_flag_counts():
    values, _ = settings(parse("m", "--port", "1", "--host", "a", "--port", "2", "--host", "b"))
    assert values == {"model": "m", "port": 2, "host": "b"}


def test_aliases_of_one_flag_are_one_flag():
    values, _ = settings(parse("--tp_size", "2", "--tensor_parallel_size", "4"))
    assert values == {"tensor_parallel_size": 4}
    for name in ("free_gpu_memory_fraction", "kv-cache-free-gpu-memory-fraction"):
        values, _ = settings(parse(f"--{name}", "0.7"))
        assert values == {"kv_cache_config": {"free_gpu_memory_fraction": 0.7}}


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], {}),
        (["--enable_chunked_prefill"], {"enable_chunked_prefill": True}),
        (["--no-enable-chunked-prefill"], {"enable_chunked_prefill": False}),
        (["--enable_chunked_prefill=false"], {"enable_chunked_prefill": False}),
        (["--enable-chunked-prefill=True"], {"enable_chunked_prefill": True}),
    ],
)
def test_switches(argv, expected):
    assert settings(parse(*argv))[0] == expected


def test_a_bare_switch_does_not_swallow_the_model():
    values, _ = settings(parse("--trust_remote_code", "m"))
    assert values == {"trust_remote_code": True, "model": "m"}


def test_a_switch_takes_only_true_and_false():
    with pytest.raises(ConfigError, match="--trust_remote_code is 'maybe'"):
        normalize(["--trust-remote-code=maybe"])


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--grpc"], "only HTTP is served"),
        (["--server_role", "CONTEXT"], "no cluster to join"),
        (["--disagg-cluster-uri", "http://x"], "no cluster to join"),
        (["--middleware", "a.b"], "code named on the command line is not loaded"),
    ],
)
def test_flags_that_would_change_what_is_served_are_refused(argv, reason):
    with pytest.raises(ConfigError, match=reason):
        settings(parse("m", *argv))


def test_flags_without_effect_give_a_line_each_and_harmless_values_none():
    values, warnings = settings(parse("m", "--backend", "pytorch", "--no-telemetry"))
    assert (values, warnings) == ({"model": "m"}, [])
    flags = ("--backend", "tensorrt", "--report_addr", "x")
    _, warnings = settings(parse("m", *flags))
    ignored = [line.split(" is ignored: ")[0] for line in warnings]
    assert ignored == ["--backend", "--report_addr"]
