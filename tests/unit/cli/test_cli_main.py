"""The commands as a user calls them: quick help, exit codes, messages, what reaches the server."""

import logging
import os
import subprocess
import sys
import types

import pytest

from penstock.cli.main import main, trtllm_serve
from penstock.config.schema import DEFAULT_MODEL
from penstock.errors import ConfigError
from penstock.hub.catalog import CATALOG


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


@pytest.mark.parametrize(
    "command",
    [
        *(["--help"], ["serve", "--help"], ["eval", "--help"], ["tune", "--help"], ["--version"]),
        *(["bench", "serve", "--help"], ["bench", "throughput", "--help"]),
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

    assert min(cpu_seconds() for _ in range(3)) < 0.3


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


def test_a_model_that_was_named_is_never_replaced(served, fetched, capsys):
    fetched.missing.add(DEFAULT_MODEL)
    assert call(main, "serve", DEFAULT_MODEL) == 2
    assert call(main, "serve", "--set", f"model={DEFAULT_MODEL}") == 2
    assert served == []
    assert "no network" in capsys.readouterr().err


def test_only_models_of_the_catalogue_are_fetched_before_the_server_starts(served, fetched):
    assert DEFAULT_MODEL in CATALOG
    assert call(main, "serve", "org/m") == 0
    assert fetched.asked == []


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
    assert call(trtllm_serve, "m", "--pp_size", "4", "--backend", "trt") == 0
    lines = [line.split(" is ignored: ")[0] for line in capsys.readouterr().err.splitlines()]
    assert [line.split()[-1] for line in lines] == ["--backend", "pipeline_parallel_size"]


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
