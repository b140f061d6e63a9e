"""The commands as a user calls them: quick help, exit codes, messages, what reaches the server."""

import argparse
import logging
import os
import re
import subprocess
import sys
import types
from typing import get_args

import pytest

from penstock.cli import main as main_module
from penstock.cli.main import main, trtllm_serve
from penstock.cli.serve import TINY_PROMPTS
from penstock.config.schema import DEFAULT_MODEL, EngineConfig
from penstock.errors import ConfigError
from penstock.hub.catalog import CATALOG
from penstock.server.state import model_name


@pytest.fixture
def served(monkeypatch):
    """The configurations that reach the server, in place of a server."""
    monkeypatch.setattr(logging.root, "handlers", list(logging.root.handlers))
    configs = []
    launch = types.ModuleType("penstock.server.launch")
    launch.serve = lambda config, begun_at: configs.append(config) or 0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "penstock.server.launch", launch)
    return configs


def call(entry, *argv: str) -> int:
    with pytest.raises(SystemExit) as ended:
        entry(list(argv))
    return ended.value.code


@pytest.mark.parametrize("command", [["recipes"], ["completion", "bash"]])
def test_output_that_nobody_reads_is_no_error(command):
    reader, writer = os.pipe()
    os.close(reader)  # as `penstock recipes | head` does, sooner or later
    try:
        program = [sys.executable, "-m", "penstock", *command]
        done = subprocess.run(program, stdout=writer, stderr=subprocess.PIPE, check=False)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_pipe_of_our_own_that_breaks_is_an_error(monkeypatch):
    def run(parser: argparse.ArgumentParser, argv: list[str]) -> int:
        raise BrokenPipeError

    monkeypatch.setattr(main_module, "_run", run)
    with pytest.raises(BrokenPipeError):
        main(["recipes"])


@pytest.mark.parametrize(
    "command",
    [
        *(["--help"], ["serve", "--help"], ["eval", "--help"], ["tune", "--help"], ["--version"]),
        *(["bench", "serve", "--help"], ["bench", "chat", "--help"]),
        ["bench", "throughput", "--help"],
    ],
)
def test_help_needs_little_and_is_quick(command):
    program = [sys.executable, "-X", "importtime", "-m", "penstock", *command]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "penstock.cli.main" in imported
    heavy = {"torch", "pydantic", "yaml", "numpy", "transformers", "tokenizers", "starlette"}
    assert imported & heavy == set()

    def cpu_seconds() -> float:
        before = os.times()
        subprocess.run(
            [sys.executable, "-m", "penstock", *command], stdout=subprocess.DEVNULL, check=True
        )
        after = os.times()
        return sum(after[2:4]) - sum(before[2:4])  # of the child; waiting for a core is not ours

    assert min(cpu_seconds() for _ in range(3)) < 0.5


def parsers():
    """Every command with its parser, by name."""
    found = {}
    stack = [main_module._parser(), main_module._benchmark_parser()]
    stack += [main_module._trtllm_parser(), main_module._trtllm_eval_parser()]
    while stack:
        parser = stack.pop()
        found[parser.prog] = parser
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                stack += action.choices.values()
    return found


def test_every_flag_says_what_it_does_and_its_default():
    seen = parsers()
    assert len(seen) > 15
    for name, parser in seen.items():
        shown = " ".join(parser.format_help().split())
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction) or action.help == argparse.SUPPRESS:
                continue
            assert action.help, f"{name} {action.option_strings} has no help"
            told = isinstance(action.default, int | float | str) and action.nargs != 0
            if told and action.option_strings and action.default != argparse.SUPPRESS:
                begin = shown.index(action.option_strings[0] + " ")
                assert "default: " in shown[begin : begin + 300], (name, action.option_strings)


def test_help_of_serve_has_the_schemas_defaults_and_only_what_has_an_effect(capsys):
    assert call(main, "serve", "--help") == 0
    text = capsys.readouterr().out
    assert "port to listen on; 0 picks a free one (default: 8000)" in text
    assert "--grpc" not in text
    assert "ignored" not in text
    for flag in ("--help-all", "--help_all"):
        assert call(main, "serve", flag) == 0
        everything = capsys.readouterr().out
        assert "--grpc" in everything
        assert "rejected: only HTTP is served" in everything
        assert "port to listen on; 0 picks a free one (default: 8000)" in everything


def test_a_model_that_cannot_be_found_is_answered_with_the_nearest_name(
    monkeypatch, tmp_path, capsys
):
    def nowhere(model, revision, weights):
        raise ConfigError(f"model '{model}': not here")

    download = types.SimpleNamespace(download=nowhere)
    monkeypatch.setitem(sys.modules, "penstock.hub.download", download)
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    assert call(main, "pull", "smollm") == 2
    expected = "error: model 'smollm'; did you mean 'smollm2'? (model 'smollm': not here)\n"
    assert capsys.readouterr().err == expected
    assert call(main, "pull", "nosuch") == 2
    assert "model 'nosuch': not here; short names are smollm2, tiny" in capsys.readouterr().err
    assert call(main, "pull", "org/smollm") == 2
    assert capsys.readouterr().err.endswith("'org/smollm': not here\n")


@pytest.fixture
def fetched(monkeypatch):
    """The models asked for, in place of downloads; one that stands in `missing` cannot be had."""
    asked, missing = [], set()

    def local_folder(model):
        asked.append(model)
        if model in missing:
            raise ConfigError(f"cannot fetch '{model}': no network")

    monkeypatch.setattr("penstock.cli.serve.local_folder", local_folder)
    return types.SimpleNamespace(asked=asked, missing=missing)


def test_serve_without_a_model_serves_the_default_one(served, fetched):
    assert call(main, "serve") == 0
    assert served[0].model == DEFAULT_MODEL
    assert fetched.asked == [DEFAULT_MODEL]


def test_where_the_default_model_cannot_be_had_the_built_in_one_is_served(served, fetched, capsys):
    fetched.missing.add(DEFAULT_MODEL)
    assert call(main, "serve", "--port", "9", "--api_key", "secret") == 0
    assert (served[0].model, served[0].port, served[0].api_key) == ("tiny", 9, "secret")
    [line] = capsys.readouterr().err.splitlines()
    assert "no network. Serving the built-in 'tiny' instead: a test model of 3.5 M" in line
    assert all(f"'{prompt}'" in line for prompt in TINY_PROMPTS)


def test_the_built_in_model_answers_under_its_own_name(served, fetched):
    """A name chosen for another model would hide which one answers."""
    fetched.missing.add(DEFAULT_MODEL)
    assert call(main, "serve", "--served_model_name", "gpt-4") == 0
    assert model_name(served[0]) == "tiny"


def test_a_model_that_was_named_is_never_replaced(served, fetched, capsys):
    fetched.missing.add(DEFAULT_MODEL)
    assert call(main, "serve", DEFAULT_MODEL) == 2
    assert call(main, "serve", "--set", f"model={DEFAULT_MODEL}") == 2
    assert served == []
    assert "no network" in capsys.readouterr().err


def test_only_models_of_the_catalog_are_fetched_before_the_server_starts(served, fetched):
    assert DEFAULT_MODEL in CATALOG
    assert call(main, "serve", "org/m") == 0
    assert fetched.asked == []


def test_help_of_serve_lists_every_log_level(capsys):
    levels = get_args(get_args(EngineConfig.model_fields["log_level"].annotation)[0])
    assert call(main, "serve", "--help") == 0
    text = capsys.readouterr().out
    text = " ".join(text[text.index("--log_level") :].split())
    assert re.findall(r"\w+", text.partition(" (")[0])[2:] == [*levels[:-1], "or", levels[-1]]


def test_serve_passes_flags_yaml_and_set(served, tmp_path):
    path = tmp_path / "c.yml"
    path.write_text("max_num_tokens: 4096\nkv_cache_config: {max_tokens: 64}\n")
    status = call(
        main,
        *("serve", "m", "--max-batch-size", "8", "--max_num_tokens", "1", "--config", str(path)),
        *("--kv_cache_free_gpu_memory_fraction", "0.5", "--set", "port=9", "--set=seed=3"),
    )
    assert status == 0
    (config,) = served
    assert (config.model, config.max_batch_size, config.max_num_tokens) == ("m", 8, 4096)
    assert config.kv_cache_config.max_tokens == 64
    assert config.kv_cache_config.free_gpu_memory_fraction == 0.5
    assert (config.port, config.seed) == (9, 3)


@pytest.mark.parametrize("first", [[], ["serve"]], ids=["short", "long"])
def test_trtllm_serve_takes_both_forms(served, first):
    assert call(trtllm_serve, *first, "org/m", "--tp_size", "2", "--trust_remote_code") == 0
    assert (served[0].model, served[0].tensor_parallel_size) == ("org/m", 2)


def test_trtllm_serve_has_neutral_sampling_defaults_unless_it_is_told_otherwise(served, tmp_path):
    path = tmp_path / "c.yml"
    path.write_text("generation_config: auto\n")
    for entry, argv in (
        (main, ["serve"]),
        (trtllm_serve, []),
        (trtllm_serve, ["--generation_config", "auto"]),
        (trtllm_serve, ["--config", str(path)]),
    ):
        assert call(entry, *argv, "org/m") == 0
    assert [one.generation_config for one in served] == ["auto", "trtllm", "auto", "auto"]


def test_trtllm_serve_takes_options_before_the_model(served):
    assert call(trtllm_serve, "--port", "9", "org/m") == 0
    assert (served[0].model, served[0].port) == ("org/m", 9)


def test_trtllm_serve_takes_the_model_from_the_file(served, tmp_path):
    path = tmp_path / "c.yml"
    path.write_text("model: org/m\n")
    assert call(trtllm_serve, "--extra_llm_api_options", str(path)) == 0
    assert served[0].model == "org/m"


@pytest.mark.parametrize(
    ("entry", "argv", "message"),
    [
        (trtllm_serve, ["--port", "9"], "error: MODEL is missing"),
        (trtllm_serve, ["disaggregated", "-c", "x"], "trtllm-serve disaggregated is not available"),
        (trtllm_serve, ["m", "--max_batch", "3"], "did you mean '--max_batch_size'?"),
        (trtllm_serve, ["m", "--prot=3"], "unknown flag '--prot'; did you mean '--port'?"),
        (main, ["serve", "--max-num-seqs=9"], "'--max_num_seqs'; here it is --max_batch_size"),
        (trtllm_serve, ["m", "n"], "unexpected argument 'n'"),
        (trtllm_serve, ["m", "--port", "x"], "argument --port: invalid int value: 'x'"),
        (trtllm_serve, ["m", "--port"], "expected one argument (see trtllm-serve --help)"),
        (
            trtllm_serve,
            ["m", "--max_batch_size", "0"],
            "max_batch_size is 0, it must be at least 1",
        ),
        (trtllm_serve, ["m", "--custom_tokenizer", "x"], "custom_tokenizer cannot be used"),
        (trtllm_serve, ["m", "--config", "nowhere.yml"], "cannot read the configuration file"),
        (main, ["srve"], "invalid choice: 'srve'"),
        (main, ["chatt"], "invalid choice: 'chatt'; did you mean 'chat'? (see penstock --help)"),
        (main, ["xyz"], "invalid choice: 'xyz'; there are serve, chat, pull, models, recipes"),
        (main, ["bench", "serv"], "did you mean 'serve'?"),
        (main, ["quantize", "m", "--format", "int8"], "did you mean 'int8_sq'?"),
        (main, ["--prot"], "unknown flag '--prot'"),
        (main, ["serve", "--set", "port"], "expected NAME=VALUE"),
    ],
)
def test_a_mistake_is_one_message_and_status_2(served, capsys, entry, argv, message):
    assert call(entry, *argv) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert "Traceback" not in printed
    assert served == []


@pytest.mark.parametrize("entry", [main, trtllm_serve])
def test_without_arguments_the_help_is_shown(capsys, entry):
    assert call(entry) == 0
    assert "usage:" in capsys.readouterr().out


def test_warnings_reach_the_log(served, capsys):
    assert call(trtllm_serve, "m", "--gpus_per_node", "4", "--backend", "trt") == 0
    lines = [line.split(" is ignored: ")[0] for line in capsys.readouterr().err.splitlines()]
    assert [line.split()[-1] for line in lines] == ["--backend", "gpus_per_node"]


def test_other_commands_get_their_arguments(monkeypatch):
    seen = {}
    for name in ("chat", "doctor"):
        module = types.ModuleType(f"penstock.cli.{name}")
        module.run = lambda args, name=name: seen.update({name: args}) or 3
        monkeypatch.setitem(sys.modules, f"penstock.cli.{name}", module)
    assert call(main, "chat", "--max-tokens", "5", "--system", "be brief") == 3
    assert call(main, "doctor", "--json") == 3
    assert (seen["chat"].url, seen["chat"].max_tokens) == ("http://localhost:8000", 5)
    assert (seen["chat"].system, seen["chat"].temperature) == ("be brief", None)
    assert seen["doctor"].json is True
